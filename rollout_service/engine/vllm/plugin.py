"""Entry point of vLLM's plugin group `vllm.general_plugins`.

vLLM calls `register` in each of its processes, before it builds a worker.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from rollout_service.engine.vllm.objects import BlockPool, Scheduler

if TYPE_CHECKING:
    import torch

BACKEND = "asyncrl"
WORKER_EXTENSION = "rollout_service.engine.vllm.weight_transfer.LoadReporter"
REPORT = "report_staged_load"
REFUSED = "report_refused_modules"
OTHER_WORKER = "another worker of this engine"
"""Prefix of the report of a worker that stopped because of another one."""
WATCHER = "asyncrl-parent-watcher"
PADS = "ASYNCRL_PADS_SINGLE_ROWS"
"""Variable under which single rows are padded to two, on a CPU."""
FORGETS, PADS_ROWS = "_forgets_prefixes", "_pads_single_rows"
QUANTIZATIONS = {"int8": "asyncrl_int8", "fp8": "fp8_per_tensor"}
"""`rollout.quantization` -> vLLM's name. Weights are quantised as they are loaded."""


def register() -> None:
    """Register the weight-transfer backend; calling it twice does no harm."""
    _end_with_parent()
    _permit_tiles()
    _forget_prefixes_at_resumption()
    _pad_single_rows()
    _rotate_heads_natively()
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    from rollout_service.engine.vllm.quantized import register_int8

    register_int8(QUANTIZATIONS["int8"])
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            BACKEND, "rollout_service.engine.vllm.weight_transfer", "StagedWeightTransferEngine"
        )


def _end_with_parent() -> None:
    """Have a child process of vLLM end when the replica is gone, also when that was killed."""
    parent = multiprocessing.parent_process()
    is_watched = any(thread.name == WATCHER for thread in threading.enumerate())
    if parent is None or is_watched:
        return

    def watch() -> None:
        parent.join()  # without deadline: it ends with one of the two processes
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name=WATCHER, daemon=True).start()


def _permit_tiles() -> None:
    """Ask Linux for the AMX registers, which vLLM's attention in bfloat16 uses where the processor has them.

    vLLM 0.32 does not ask, and its engine core ends by SIGILL. Where there is no AMX this does nothing.
    """
    import torch

    torch.cpu._init_amx()


def _pad_single_rows() -> None:
    """Have products of one row computed as those of two, if the environment says so, on a CPU.

    oneDNN multiplies one row by another kernel than several, in another order of sums, from some width on: a
    request that is alone in a step gets other last digits than beside others. Weights that are not quantised.
    """
    from vllm.model_executor.layers import utils

    multiply: Callable[..., torch.Tensor] = utils.cpu_unquantized_gemm
    if os.environ.get(PADS, "0") == "0" or hasattr(multiply, PADS_ROWS):
        return

    def multiply_padded(
        layer: torch.nn.Module, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        if x.numel() != x.shape[-1]:
            return multiply(layer, x, weight, bias)
        rows = x.reshape(1, -1).expand(2, -1).contiguous()
        return multiply(layer, rows, weight, bias)[:1].view(*x.shape[:-1], -1)

    setattr(multiply_padded, PADS_ROWS, True)
    utils.cpu_unquantized_gemm = multiply_padded


def _rotate_heads_natively() -> None:
    """Have vLLM rotate what comes by heads, as in latent attention, by its own formula on a CPU.

    The kernel of vLLM 0.32 takes the step from head to head for that from token to token: log-probs off by 3.
    """
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    kernel: Callable[..., object] = RotaryEmbedding.forward_cpu

    def rotate(self: RotaryEmbedding, positions: object, query: torch.Tensor, key: object = None) -> object:
        return (self.forward_native if query.ndim > 2 else partial(kernel, self))(positions, query, key)

    RotaryEmbedding.forward_cpu = rotate


def _forget_prefixes_at_resumption() -> None:
    """Have an engine core in this process find no block, once it resumes, that was computed before.

    A prompt is salted with the version that is served when it is sent, and may wait in the core through a
    swap. With `rollout.kv_cache: keep` vLLM 0.32 keeps the index of cached blocks then: such a request began
    on keys and values of the older weights (log-probs off by 2.9). vLLM's own reset refuses while a request
    holds blocks.
    """
    from vllm.v1.core.sched import scheduler
    from vllm.v1.core.sched.interface import PauseState

    kind = scheduler.Scheduler
    if hasattr(kind, FORGETS):
        return
    set_state = kind.set_pause_state

    def set_pause_state(self: Scheduler, pause_state: object) -> None:
        if pause_state is PauseState.UNPAUSED:
            _forget(self.kv_cache_manager.block_pool)
        set_state(self, pause_state)

    kind.set_pause_state = set_pause_state
    setattr(kind, FORGETS, True)


def _forget(pool: BlockPool) -> None:
    """Take every block out of the index; those that running requests hold stay theirs."""
    pool.cached_block_hash_to_block = type(pool.cached_block_hash_to_block)()
    pool.cached_block_hashes_by_block.clear()
    for block in pool.blocks:
        block.reset_hash()
