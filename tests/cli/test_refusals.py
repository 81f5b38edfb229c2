"""Bad input to a real `asyncrl up`: one clear message with its place, exit code 2, nothing started."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

GOOD = """\
run: {{name: refused, dir: {folder}}}
model:
  path: {folder}/model
data: {{train: {folder}/train.jsonl}}
reward: {{fn: gsm8k}}
launcher:
  api_port: {port}
"""


def up(folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    (folder / "cluster.yaml").write_text(text)
    return subprocess.run(
        [sys.executable, "-m", "asyncrl.cli", "up", "cluster.yaml"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1=", "ground_truth": "2"}\n')
    return tmp_path


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (("  path: ", "  paht: "), ("cluster.yaml:3:3", "paht", "path")),
        (("api_port: 0", "api_port: many"), ("cluster.yaml:7:13", "api_port")),
        (("/model\n", "/nowhere\n"), ("cluster.yaml:3:9", "holds no Hugging Face model")),
        (("train.jsonl", "absent.jsonl"), ("cluster.yaml:4:", "there is no file")),
        (("fn: gsm8k", "fn: nowhere.py:score"), ("cluster.yaml:5:", "nowhere.py")),
        (("launcher:", "rollout: {gpus: 64}\nlauncher:"), ("ask for 64 GPUs", "set both to 0")),
        (("launcher:", "rollout: {replicas: 5000}\nlauncher:"), ("CPUs", "this machine has")),
    ],
    ids=["unknown key", "wrong type", "no model", "no data", "no reward", "too few GPUs", "too few CPUs"],
)
def test_bad_input_is_one_message_and_code_2(
    folder: Path, change: tuple[str, str], expected: tuple[str, ...]
) -> None:
    done = up(folder, GOOD.format(folder=folder, port=0).replace(*change))
    assert done.returncode == 2, done.stderr
    for part in expected:
        assert part in done.stderr
    assert "Traceback" not in done.stderr + done.stdout
    assert not (folder / "refused").exists(), "nothing was started"


def test_a_port_in_use_is_one_message_and_code_2(folder: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = up(folder, GOOD.format(folder=folder, port=taken.getsockname()[1]))
    assert done.returncode == 2
    assert "cluster.yaml:7:13" in done.stderr and "is in use" in done.stderr
    assert not (folder / "refused").exists()


def test_problems_of_the_file_and_of_what_it_names_come_all_at_once(folder: Path) -> None:
    text = (
        GOOD.format(folder=folder, port=0)
        .replace("/model\n", "/nowhere\n")
        .replace("train.jsonl", "no.jsonl")
    )
    done = up(folder, text)
    assert done.returncode == 2
    assert "model.path" in done.stderr and "data.train" in done.stderr
