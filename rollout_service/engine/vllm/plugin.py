"""Entry point of vLLM's plugin group `vllm.general_plugins`.

vLLM calls `register` in each of its processes, before it builds a worker.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading

from rollout_service.engine.vllm.objects import BlockPool, Scheduler

BACKEND = "asyncrl"
WORKER_EXTENSION = "rollout_service.engine.vllm.weight_transfer.LoadReporter"
REPORT = "report_staged_load"
REFUSED = "report_refused_modules"
OTHER_WORKER = "another worker of this engine"
"""Prefix of the report of a worker that stopped because of another one."""
WATCHER = "asyncrl-parent-watcher"
FORGETS = "_forgets_prefixes"
QUANTIZATIONS = {"int8": "asyncrl_int8", "fp8": "fp8_per_tensor"}
"""`rollout.quantization` -> vLLM's name. Weights are quantised as they are loaded."""


def register() -> None:
    """Register the weight-transfer backend; calling it twice does no harm."""
    _end_with_parent()
    _permit_tiles()
    _forget_prefixes_at_resumption()
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    from rollout_service.engine.vllm.core.single_rows import pad_single_rows
    from rollout_service.engine.vllm.quantized import register_int8

    pad_single_rows()
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
