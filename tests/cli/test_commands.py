import json
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl import __version__
from asyncrl.cli.exits import code_of
from asyncrl.cli.run.client import NotRunning
from asyncrl.core.errors import ConfigError, DataError, DeadlineExceeded, ServiceFailed
from tests.cli.commands import calling
from tests.setup.suite.core_alone import needs_all

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("numpy", "zmq", "pydantic", "ruamel", "rich", "torch", "vllm", "ray", "megatron", "transformers")


def asyncrl(*arguments, cwd, code="from asyncrl.cli.app import main; main()"):
    # stdin is closed and the terminal is none: what a script sees
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=cwd,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_help_names_every_command_and_loads_nothing_heavy(tmp_path):
    code = f"""
import sys
from asyncrl.cli.app import main
try:
    main()
finally:
    print([name for name in {HEAVY} if name in sys.modules], file=sys.stderr)
"""
    done = asyncrl("--help", cwd=tmp_path, code=code)
    assert done.returncode == 0
    assert all(command in done.stdout for command in ("up", "status", "down", "scale", "data", "bench"))
    assert done.stderr == "[]\n"


def test_the_version_is_printed(tmp_path):
    assert asyncrl("--version", cwd=tmp_path).stdout == f"{__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["up"], 2, "Missing argument"),
        (["up", "nope.yaml"], 2, "there is no configuration 'nope.yaml'"),
        (["up", "quickstart", "--set", "learner.lr=x"], 2, "--set learner.lr=x: learner.lr is 'x'"),
        (
            ["up", "quickstart", "--set", "data.train=nope.parquet"],
            2,
            "--set data.train=nope.parquet: data.train",
        ),
        (["sttus"], 2, "Did you mean 'status'?"),
        (["status", "--nope"], 2, "No such option"),
        (["status"], 4, "there is no run"),
        (["status", "--json"], 4, "there is no run"),
        (["down", "--run", "x"], 4, "there is no run 'x'"),
        (["scale", "rollout=3"], 4, "there is no run"),
        (["scale", "learner=3"], 2, "rollout=N"),
        (["scale", "rollout=-1"], 2, "rollout=N"),
        (["data", "gsm8k", "nope.jsonl", "out.parquet"], 2, "does not exist"),
        pytest.param(
            ["bench", "pipeline", "--nope"], 2, "unrecognized arguments: --nope", marks=needs_all, id="bench"
        ),
    ],
)
def test_a_refused_command_is_one_message_on_stderr_and_an_exit_code(
    tmp_path, monkeypatch, arguments, code, said
):
    monkeypatch.chdir(tmp_path)
    done = calling.asyncrl(*arguments)
    assert (done.code, done.out) == (code, "")
    assert said in done.err
    assert "Traceback" not in done.err
    assert not list(tmp_path.iterdir()), "nothing was started or written"


def test_all_problems_of_a_file_are_shown_each_with_its_place(tmp_path):
    (tmp_path / "a.yaml").write_text("model: {path: m}\nlearner:\n  lr: fast\n  stepz: 3\n")
    done = asyncrl("up", "a.yaml", cwd=tmp_path)
    assert done.returncode == 2
    assert [line.split(": ")[0] for line in done.stderr.splitlines()] == [
        "a.yaml:1:1",
        "a.yaml:1:1",
        "a.yaml:3:7",
        "a.yaml:4:3",
    ]


def test_gsm8k_becomes_prompts_and_a_bad_row_is_refused(tmp_path):
    row = json.dumps({"question": "1+1?", "answer": "It is 2.\n#### 2"})
    (tmp_path / "good.jsonl").write_text(f"{row}\n{row}\n")
    done = asyncrl("data", "gsm8k", "good.jsonl", "out/train.parquet", "--limit", "1", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "")
    assert "wrote 1 prompts to out/train.parquet" in done.stderr
    assert (tmp_path / "out/train.parquet").stat().st_size > 0
    (tmp_path / "bad.jsonl").write_text("{}\n")
    done = asyncrl("data", "gsm8k", "bad.jsonl", "bad.parquet", cwd=tmp_path)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("x"), 2),
        (DataError("x"), 2),
        (NotRunning("x"), 4),
        (ServiceFailed("x"), 1),
        (DeadlineExceeded("x"), 1),
    ],
)
def test_each_kind_of_error_has_its_exit_code(error, code):
    assert code_of(error) == code


def test_a_file_in_the_folder_of_commands_is_a_command(tmp_path):
    (tmp_path / "greeting.py").write_text(
        "import typer\n\napp = typer.Typer()\n\n\n@app.command()\ndef greet() -> None:\n    print('hello')\n"
    )
    code = f"""
from asyncrl.cli import commands
commands.__path__.append({str(tmp_path)!r})
from asyncrl.cli.app import main
main()
"""
    done = asyncrl("greet", cwd=tmp_path, code=code)
    assert (done.returncode, done.stdout) == (0, "hello\n"), done.stderr
