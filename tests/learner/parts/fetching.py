"""Ranks that fetch their share of a batch from a real buffer, and count what comes to them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import xxhash

from asyncrl.buffer.client import LearnerClient
from asyncrl.core.experience import Group, encode_group
from learner.backend import Placement
from learner.batch_fetcher import BatchFetcher, SharedFetcher
from learner.fsdp2.backend import Fsdp2Backend
from learner.megatron.backend import MegatronBackend
from learner.ranks import Ranks
from tests.learner.parts.training import open_backend


class CountedFetcher(BatchFetcher):
    """Notes the bytes of each group that comes from the buffer."""

    def __init__(self, client: LearnerClient) -> None:
        super().__init__(client)
        self.fetched: dict[int, int] = {}

    def fetch(self, token: int, tickets: Sequence[int]) -> list[Group]:
        groups = super().fetch(token, tickets)
        self.fetched |= {group.ticket: sum(map(len, encode_group(group))) for group in groups}
        return groups


def run_fetched(placement: Placement, job: dict[str, Any], out: Path) -> dict[str, Any]:
    """Fetch this rank's share of the batch, once; say what came from the buffer and what the rank has."""
    make = Fsdp2Backend if job["changes"].get("backend") == "fsdp2" else MegatronBackend
    backend = open_backend(Path(job["model"]), placement, make=make, **job["changes"])
    share = Ranks(placement.rank, placement.world_size, torch.device("cpu")).of_share(
        backend.dp_rank, placement.timeout_s
    )
    client = LearnerClient(job["address"])
    fetcher = CountedFetcher(client)
    tickets = job["tickets"][backend.dp_rank :: backend.dp_size]
    groups = SharedFetcher(fetcher, share).fetch(job["token"], tickets)
    digest = xxhash.xxh3_128()
    for group in groups:
        for frame in encode_group(group):
            digest.update(frame)
    client.close()
    found = {"share": backend.dp_rank, "num_bytes": sum(fetcher.fetched.values()), "fetched": fetcher.fetched}
    backend.close()
    return found | {"digest": digest.hexdigest()}
