"""`asyncrl score`: lines in, lines with scores out, whole or not at all."""

from __future__ import annotations

import io
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from asyncrl.cli import app, exits
from asyncrl.core.errors import AsyncrlError, ConfigError, DataError
from rollout_service.rewards.lines import score_lines
from rollout_service.rewards.score import RewardError
from tests.rollout.rewards.judging import write

LINES = [
    {"response": "#### 4", "ground_truth": "4", "id": "é"},
    {"response": "#### 5", "ground_truth": "4", "score": "old"},
    {"response": "four", "ground_truth": "4", "extra_info": {"a": [1]}},
]


def write_lines(folder: Path, lines: list[Any]) -> Path:
    path = folder / "in.jsonl"
    path.write_text("".join(json.dumps(line) + "\n\n" for line in lines))
    return path


def read_lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_line_keeps_its_fields_and_order_and_gets_a_score(tmp_path: Path):
    source, target = write_lines(tmp_path, LINES * 100), tmp_path / "out.jsonl"
    assert score_lines(["gsm8k"], str(source), str(target)) == 300
    wanted = [line | {"score": score} for line, score in zip(LINES, (1.0, 0.0, 0.0), strict=True)]
    assert read_lines(target) == wanted * 100
    assert "é" in target.read_text()


def test_a_response_that_is_no_text_is_written_as_it_was_read(tmp_path: Path):
    source, target = write_lines(tmp_path, [LINES[0] | {"response": "cut \ud83d"}]), tmp_path / "out.jsonl"
    assert score_lines(["exact_match"], str(source), str(target)) == 1
    assert read_lines(target) == [LINES[0] | {"response": "cut \ud83d", "score": 0.0}]


def test_several_rewards_add_their_parts(tmp_path: Path):
    source = write_lines(tmp_path, LINES[:1])
    rewards = ["gsm8k", "{fn: format, weight: 0.5, name: marked, pattern: '#+ .*'}"]
    assert score_lines(rewards, str(source), str(source)) == 1  # the source may be the target
    assert read_lines(source) == [LINES[0] | {"score": 1.5, "parts": {"gsm8k": 1.0, "marked": 1.0}}]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("no json", "line 5 is not JSON"),
        ("\xff", "line 5 is not JSON"),
        ("[1]", "line 5 is not a JSON object"),
        ('{"response": "4"}', "line 5 has no 'ground_truth'"),
        ('{"ground_truth": "4"}', "line 5 has no 'response'"),
        ('{"response": 4, "ground_truth": "4"}', "line 5: 'response' is a int"),
        ('{"response": "4", "ground_truth": "4", "prompt": ["x"]}', "line 5: 'prompt' is neither"),
        ('{"response": "4", "ground_truth": "4", "extra_info": 1}', "line 5: 'extra_info' is a int"),
    ],
)
def test_a_line_that_cannot_be_read_is_named_and_nothing_is_written(tmp_path: Path, line: str, said: str):
    source, target = write_lines(tmp_path, LINES[:2]), tmp_path / "out.jsonl"
    source.write_bytes(source.read_bytes() + line.encode("latin-1") + b"\n")
    target.write_text("as it was")
    with pytest.raises(DataError, match=said):
        score_lines(["gsm8k"], str(source), str(target))
    assert target.read_text() == "as it was"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]


def test_a_line_that_cannot_be_scored_is_named_and_nothing_is_written(tmp_path: Path):
    body = "def score(response, ground_truth):\n    return {'four': float('nan')}.get(response, 1.0)\n"
    source, target = write_lines(tmp_path, LINES), tmp_path / "out.jsonl"
    with pytest.raises(RewardError, match=r"in.jsonl, line 5: the reward 'score' returned nan") as caught:
        score_lines([write(tmp_path, body)], str(source), str(target))
    assert exits.code_of(caught.value) == exits.FAILED
    assert not target.exists()


@pytest.mark.parametrize(
    ("rewards", "source", "target", "kind"),
    [
        (["gsm9k"], "in.jsonl", "out.jsonl", ConfigError),
        (["{fn: format, weight: x}"], "in.jsonl", "out.jsonl", ConfigError),
        (["{fn: [}"], "in.jsonl", "out.jsonl", ConfigError),
        (["gsm8k"], "absent.jsonl", "out.jsonl", DataError),
        (["gsm8k"], "in.jsonl", "absent/out.jsonl", DataError),
    ],
)
def test_what_cannot_be_used_is_an_error_of_usage(
    tmp_path: Path, rewards: list[str], source: str, target: str, kind: type[AsyncrlError]
):
    write_lines(tmp_path, LINES)
    with pytest.raises(kind) as caught:
        score_lines(rewards, str(tmp_path / source), str(tmp_path / target))
    assert exits.code_of(caught.value) == exits.USAGE


def test_a_dash_stands_for_standard_input_and_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(write_lines(tmp_path, LINES).read_bytes())))
    assert score_lines(["gsm8k"], "-", "-") == 3
    assert [json.loads(line)["score"] for line in capsys.readouterr().out.splitlines()] == [1.0, 0.0, 0.0]


def test_a_line_is_scored_while_the_next_is_awaited(tmp_path: Path):
    body = "def score(response, ground_truth, seen):\n    open(seen, 'w').close()\n    return 1.0\n"
    source, seen, found = tmp_path / "lines", tmp_path / "seen", []
    os.mkfifo(source)

    def feed() -> None:
        with source.open("w") as pipe:
            pipe.write(json.dumps(LINES[0]) + "\n")
            pipe.flush()
            end = time.monotonic() + 60.0
            while not seen.exists() and time.monotonic() < end:
                time.sleep(0.01)
            found.append(seen.exists())
            pipe.write(json.dumps(LINES[1]) + "\n")

    feeder = threading.Thread(target=feed)
    feeder.start()
    reward = json.dumps({"fn": write(tmp_path, body), "seen": str(seen)})
    assert score_lines([reward], str(source), str(tmp_path / "out")) == 2
    feeder.join()
    assert found == [True]


def test_the_command_scores_a_file(tmp_path: Path):
    source, target = write_lines(tmp_path, LINES), tmp_path / "out.jsonl"
    done = CliRunner().invoke(app.app, ["score", "--reward", "gsm8k", str(source), str(target)])
    assert done.exit_code == 0, done.output
    assert len(read_lines(target)) == 3
