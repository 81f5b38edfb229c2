"""Cause of death of vLLM's engine core: it stands in the error, and not only above it in a log."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import Qwen3Config, Qwen3ForCausalLM

from rollout_service.engine.protocol import EngineDied
from rollout_service.engine.vllm.core.process import CoreLog, find_last_exception
from rollout_service.engine.vllm.engine import VllmEngine
from rollout_service.tasks.digit_sort.vocabulary import build_tokenizer
from tests.rollout.replica.flight_parts import settings_for

CORE = "(EngineCore pid=7) ERROR 11-23 18:57:30 [core.py:1512]"
LOG = f"""\
{CORE} Traceback (most recent call last):
{CORE}   File "cpu_attn.py", line 9, in build
{CORE}     raise ValueError: no line of code
{CORE} RuntimeError: Unsupported CPU attention configuration: head_dim=16 isa=2
(MainProcess pid=1) ERROR 11-23 18:57:30 [async_llm.py:906] vllm.v1.engine.exceptions.EngineDeadError: above
RuntimeError: of the replica itself
"""


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (LOG, "RuntimeError: Unsupported CPU attention configuration: head_dim=16 isa=2"),
        ("(Worker_TP1 pid=9) torch.OutOfMemoryError: no room", "torch.OutOfMemoryError: no room"),
        (f"{LOG}(EngineCore_DP0 pid=7) zmq.error.ZMQError: closed", "zmq.error.ZMQError: closed"),
        (f"{CORE} INFO all is well: no Error: here", ""),
        ("", ""),
    ],
)
def test_the_last_line_of_the_cores_last_traceback_is_found(text: str, found: str) -> None:
    assert find_last_exception(text) == found


def test_only_what_was_written_since_counts_and_only_in_a_file(tmp_path: Path) -> None:
    with (tmp_path / "log").open("a+") as file:
        file.write(LOG)
        file.flush()
        log = CoreLog(file.fileno())
        assert log.last_exception() == ""
        file.write(f"{CORE} OSError: no space\n")
        file.flush()
        assert log.last_exception() == "OSError: no space"
    reading, writing = os.pipe()
    os.write(writing, LOG.encode())
    assert CoreLog(writing).last_exception() == ""
    os.close(reading), os.close(writing)


def start_engine(folder: str) -> None:
    """Start an engine with a model whose heads vLLM's attention on CPU does not have; say how it fails."""

    async def start() -> None:
        engine = VllmEngine(settings_for(folder))
        try:
            await engine.start()
        except EngineDied as error:
            (Path(folder) / "said").write_text(str(error))
        finally:
            await engine.shutdown()

    asyncio.run(start())


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_head_size_that_the_engine_lacks_is_named_by_the_real_vllm(tmp_path: Path) -> None:
    tokenizer = build_tokenizer()
    narrow = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048}
    Qwen3ForCausalLM(Qwen3Config(vocab_size=len(tokenizer), **narrow, **heads)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    code = f"from {__name__} import start_engine\nif __name__ == '__main__': start_engine({str(tmp_path)!r})"
    script = tmp_path / "start.py"
    script.write_text(code)
    with (tmp_path / "log").open("w") as log:
        subprocess.run(
            [sys.executable, str(script)],
            stdout=log,  # as a service's output, into one file
            stderr=subprocess.STDOUT,
            timeout=540,
            check=False,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
        )
    said = (tmp_path / "said").read_text()
    assert said.startswith("vLLM died: RuntimeError: Unsupported CPU attention configuration: head_dim=16")
