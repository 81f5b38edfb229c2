"""The adapter's side of SGLang's child process, with a child of the standard library's in its place."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import socket
import stat
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from transformers import AutoConfig

from asyncrl.cli.doctor import packages
from asyncrl.core.errors import EngineError, WireError
from rollout_service.engine.protocol import EngineDied
from rollout_service.engine.sglang import messages, process
from rollout_service.engine.sglang.engine import SglangEngine, SglangSettings
from rollout_service.engine.sglang.messages import Answer, Ask, Channel, Done, Failed, Resume, Started
from rollout_service.engine.sglang.process import ChildProcess
from rollout_service.engine.sglang.windows import find_ignored_window
from rollout_service.tasks.digit_sort.vocabulary import build_tokenizer


def make_child(tmp_path: Path, script: str) -> ChildProcess:
    """Return a child whose interpreter is a shell script; `$3` is the descriptor of its socket."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    return ChildProcess(python, has_gpu=False)


@pytest.mark.skipif(
    not process.PYTHON.exists(), reason="SGLang's contract needs make setup LIST=sglang, then make test-all"
)
def test_the_environment_has_the_sglang_of_the_list() -> None:
    (found,) = packages.check_environments()
    assert (found.what, found.verdict) == ("sglang", "ok"), found


def test_without_the_environment_the_command_that_makes_it_is_told(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"no interpreter for SGLang at .*none") as found:
        asyncio.run(ChildProcess(tmp_path / "none", has_gpu=False).start())
    assert "make setup LIST=sglang" in found.value.hint


WINDOW = {"sliding_window": 128, "use_sliding_window": True, "max_window_layers": 1, "num_hidden_layers": 2}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "qwen3", **WINDOW}, "without its sliding window of 128 tokens"),
        ({"model_type": "qwen2", **WINDOW}, "without its sliding window of 128 tokens"),
        ({"model_type": "mistral", "sliding_window": 128}, "without its sliding window of 128 tokens"),
        ({"model_type": "qwen3", **WINDOW, "sliding_window": 200}, "no interpreter"),
        ({"model_type": "qwen3", **WINDOW, "max_window_layers": 2}, "no interpreter"),
        ({"model_type": "qwen3", **WINDOW, "use_sliding_window": False}, "no interpreter"),
        ({"model_type": "gemma2", "sliding_window": 128}, "no interpreter"),
        ({"model_type": "llama"}, "no interpreter"),
    ],
)
def test_a_window_that_sglang_would_leave_out_is_refused(
    tmp_path: Path, config: dict[str, Any], said: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    own = {"python": str(tmp_path / "none")}
    engine = SglangEngine(
        SglangSettings(str(tmp_path), "float32", 200, 4, 64 << 20, engine_args=own), build_tokenizer()
    )
    with pytest.raises(EngineError, match=said):
        asyncio.run(engine.start())


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "mistral"])
def test_a_window_is_that_which_transformers_read(kind: str) -> None:
    values = {
        "sliding_window": [128, None],
        "use_sliding_window": [True, False],
        "max_window_layers": [1, 2],
        "num_hidden_layers": [2, 40],
        "layer_types": [["full_attention"] * 2, ["full_attention", "sliding_attention"]],
    }
    found = set()
    for choice in itertools.product(*([*some, ...] for some in values.values())):
        table: dict[str, Any] = {k: v for k, v in zip(values, choice, strict=True) if v is not ...}
        if "layer_types" in table and table.get("num_hidden_layers") != 2:
            continue
        config = AutoConfig.for_model(kind, **table)
        in_layers = kind == "mistral" or "sliding_attention" in config.layer_types
        is_used = config.sliding_window and in_layers
        told = find_ignored_window({"model_type": kind, **table}, 5000)
        assert bool(told) == bool(is_used) and (not told or f" {config.sliding_window} " in told), table
        found.add(told)
    assert len(found) == 3, "none, the model's own, the default"


def test_a_child_that_ends_fails_all_that_is_asked_of_it(tmp_path: Path) -> None:
    async def ask() -> None:
        child = make_child(tmp_path, "read line; exit 7")
        await child.start()
        try:
            with pytest.raises(EngineDied, match="ended with status 7"):
                await child.ask(Resume(child.new_number()), "the resumption", 30.0)
            with pytest.raises(EngineDied, match="ended with status 7"):
                await child.ask(Resume(child.new_number()), "the resumption", 30.0)
        finally:
            await child.end()

    asyncio.run(ask())


def test_an_answer_that_does_not_come_ends_at_its_deadline_and_the_child_with_its_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "END_S", 0.2)

    async def ask() -> tuple[int, list[psutil.Process], str]:
        child = make_child(tmp_path, "sleep 600 & sleep 600")
        await child.start()
        pid, folder = child.pid, child._folder
        with pytest.raises(EngineError, match=r"did not finish the resumption within 0\.5 s"):
            await child.ask(Resume(child.new_number()), "the resumption", 0.5)
        others = psutil.Process(pid).children()
        assert os.getsid(pid) == pid and len(others) == 2 and Path(folder).is_dir()
        await child.end()
        return pid, others, folder

    pid, others, folder = asyncio.run(ask())
    assert not psutil.wait_procs(others, 10.0)[1] and not psutil.pid_exists(pid)
    assert not Path(folder).exists()


def test_a_child_that_hangs_up_and_cannot_be_killed_fails_all_that_is_asked_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "END_S", 0.2)

    async def ask() -> None:
        hang_up = "import os, sys, time; os.close(int(sys.argv[1])); time.sleep(600)"
        child = make_child(tmp_path, f"exec {sys.executable} -c '{hang_up}' $3")
        kill, kills = child._kill_session, list[None]()
        monkeypatch.setattr(child, "_kill_session", lambda: kill() if kills else kills.append(None))
        await child.start()
        try:
            with pytest.raises(EngineDied, match="goes on although it was killed"):
                await child.ask(Resume(child.new_number()), "the resumption", 30.0)
        finally:
            await child.end()

    asyncio.run(ask())


async def _pair() -> tuple[Channel[Answer], Channel[Ask], socket.socket]:
    ours, theirs = socket.socketpair()
    raw = theirs.dup()
    return await Channel.over(ours, Answer), await Channel.over(theirs, Ask), raw


MESSAGES: list[Any] = [
    Started(1, [5, 6]),
    Done(2),
    Failed(3, "why"),
    messages.Generated(4, b"\x01\x00\x00\x00", b"\x00\x00\x00\x00", [(7, 0, 1)], "stop"),
]


def test_messages_arrive_as_they_were_sent_and_none_after_the_end() -> None:
    async def exchange() -> list[object]:
        near, far, raw = await _pair()
        for message in MESSAGES:
            far.send(message)
        far.close()
        raw.close()
        return [await near.receive() for _ in range(len(MESSAGES) + 1)]

    assert asyncio.run(exchange()) == [*MESSAGES, None]


@pytest.mark.parametrize(
    "frame",
    [
        (messages.MAX_FRAME_BYTES + 1).to_bytes(4, "big"),
        b"\x00\x00\x00\x01\xc1",
        b"\x00\x00\x00\x02\x91\x01",
    ],
    ids=["too long", "no msgpack", "no message"],
)
def test_a_frame_that_holds_no_message_is_refused(frame: bytes) -> None:
    async def receive() -> None:
        near, _far, raw = await _pair()
        raw.sendall(frame)
        await near.receive()

    with pytest.raises(WireError):
        asyncio.run(receive())


def test_a_message_that_would_not_be_read_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "MAX_FRAME_BYTES", 100)

    async def send() -> None:
        near, _far, _raw = await _pair()
        near.send(Failed(1, "x" * 200))

    with pytest.raises(WireError, match="at most 100"):
        asyncio.run(send())
