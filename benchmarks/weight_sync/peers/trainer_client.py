"""vLLM's own trainer clients: tries each of them on this machine and reports what it says.

Owns no transfer. Both (NCCL broadcast, CUDA IPC) move device memory; without a GPU their first call
fails, and its words are the result.
"""

from __future__ import annotations

from multiprocessing.connection import Connection
from typing import Any

import torch

from benchmarks.weight_sync.peers.peers import FRESH, Peer


class SilentClient:
    """Stands for the engine's control plane; the trainers fail before they need it."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None: ...

    def start_weight_update(self) -> None: ...

    def update_weights(self, update_info: Any) -> None: ...

    def finish_weight_update(self, weight_version: str | None = None) -> None: ...


def try_clients() -> dict[str, str]:
    """Return, for each backend of vLLM's trainer side, `ok` or the error of sending one small model."""
    from vllm.distributed.weight_transfer.base import ModuleSource
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
    from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

    infos: dict[str, Any] = {
        "nccl": NCCLTrainerInitInfo(rank=0, master_address="127.0.0.1", master_port=0, world_size=2),
        "ipc": IPCTrainerInitInfo(rank=0),
    }
    said = {}
    for backend, info in infos.items():
        source = ModuleSource(torch.nn.Linear(8, 8))
        try:
            trainer = WeightTransferTrainerFactory.trainer_init(info, client=SilentClient(), source=source)
            trainer.send_weights()
        except (RuntimeError, ValueError, AssertionError, NotImplementedError, OSError) as error:
            said[backend] = f"{type(error).__name__}: {str(error).splitlines()[0]}"[:300]
        else:
            said[backend] = "ok"
    return said


def run_clients(pipe: Connection) -> None:
    """Entry of the process that tries."""
    pipe.send(try_clients())


def ask_clients() -> dict[str, str]:
    """Return `try_clients()` of a process of its own: importing vLLM changes much."""
    peer = Peer("vLLM's trainer client", run_clients, way=FRESH)
    try:
        answer: dict[str, str] = peer.hear()
    finally:
        peer.close()
    return answer
