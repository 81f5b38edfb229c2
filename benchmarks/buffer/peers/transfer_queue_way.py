"""TransferQueue, as verl uses it: put into a partition, ask for ready rows, get them, clear them.

Runs in an environment of its own, with its default storage (one unit) over ZMQ. The module is not called
after the package: Ray puts this folder first on its workers' path.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from benchmarks.buffer.peers.load import Arrays, Log, Turn, entry_of, make_pool, pace
from benchmarks.buffer.peers.ray_pipes import connect_to_ray, local_address

PARTITION, TASK = "train", "learner"
FIELDS = ["response_ids", "loss_mask", "logprobs", "number"]
EMPTY_WAIT_S = 0.0005


class TransferQueue:
    """One controller, one storage unit, a client per process."""

    def __init__(self) -> None:
        self._is_open = False

    def open(self, turn: Turn) -> str:
        import transfer_queue
        from omegaconf import OmegaConf

        self.close()
        connect_to_ray("local")
        config = {
            "controller": {"polling_mode": True},
            "backend": {"SimpleStorage": {"num_data_storage_units": 1}},
        }
        if not self._is_open:
            transfer_queue.init(OmegaConf.create(config, flags={"allow_objects": True}))
        self._is_open = True
        return local_address()

    def connect(self, address: str) -> None:
        _client(address)

    def close(self) -> None:
        if self._is_open:
            import transfer_queue

            for name in transfer_queue.get_client().get_partition_list() or []:
                transfer_queue.get_client().clear_partition(name)

    def produce(self, address: str, turn: Turn, index: int) -> Log:
        log, pool, client = Log(), make_pool(turn), _client(address)
        for serial, number in pace(turn, index, log):
            client.put(_rows(entry_of(pool, serial, turn), number), partition_id=_partition(turn))
        return log

    def consume(self, address: str, turn: Turn, index: int) -> Log:
        log, client = Log(), _client(address)
        wanted = max(turn.per_entry, 1)
        while time.monotonic() < turn.stop_s:
            found = client.get_meta(FIELDS, wanted, _partition(turn), task_name=TASK)
            if not found.size:
                time.sleep(EMPTY_WAIT_S)
                continue
            rows = client.get_data(found)
            client.clear_samples(found)
            log.note(turn, int(rows["number"][0]), len(rows))
        return log


def _partition(turn: Turn) -> str:
    return f"{PARTITION}-{turn.name}"


def _client(address: str) -> Any:
    import transfer_queue

    connect_to_ray(address)
    transfer_queue.init()
    return transfer_queue.get_client()


def _rows(trajectories: list[Arrays], number: int) -> Any:
    import torch
    from tensordict import TensorDict

    columns = {name: torch.from_numpy(np.stack([one[name] for one in trajectories])) for name in FIELDS[:3]}
    columns["number"] = torch.full((len(trajectories), 1), number, dtype=torch.int64)
    return TensorDict(columns, batch_size=len(trajectories))
