"""Environment variables that vLLM reads when it is imported."""

from __future__ import annotations

import os

from asyncrl.core.files.private import keep_compiled_code_own

EVERYWHERE = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
ON_CPU = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    # The sampler's helpers are compiled at the first token even with `enforce_eager`: 4 s of each start, for
    # sums over a row.
    "TORCHDYNAMO_DISABLE": "1",
    # With it vLLM lets the worker live inside its engine core: one process less, and 12 times the throughput
    # on a small machine.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}


def prepare_environment(has_gpu: bool) -> None:
    """Set what is not set yet. Must run before vllm is imported."""
    keep_compiled_code_own()
    for name, value in {**EVERYWHERE, **({} if has_gpu else ON_CPU)}.items():
        os.environ.setdefault(name, value)
