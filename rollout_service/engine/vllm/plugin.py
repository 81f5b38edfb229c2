"""Entry point of vLLM's plugin group `vllm.general_plugins`.

vLLM calls `register` in each of its processes, before it builds a worker.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading

BACKEND = "asyncrl"
WORKER_EXTENSION = "rollout_service.engine.vllm.weight_transfer.LoadReporter"
REPORT = "report_staged_load"
REFUSED = "report_refused_modules"
OTHER_WORKER = "another worker of this engine"
"""Prefix of the report of a worker that stopped because of another one."""
WATCHER = "asyncrl-parent-watcher"


def register() -> None:
    """Register the weight-transfer backend; calling it twice does no harm."""
    _end_with_parent()
    _permit_tiles()
    from rollout_service.engine.vllm.prefixes import forget_at_resumption

    forget_at_resumption()
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

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
