"""Four ranks that fetch a reserved batch from a real buffer, under each layout."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncrl.buffer.client import LearnerClient
from asyncrl.core.experience import encode_group
from asyncrl.core.rpc import Client
from asyncrl.core.runtime.threads import ThreadRuntime
from tests.buffer.parts import make_group, make_store, serving
from tests.learner.parts.launching import run_ranks
from tests.learner.parts.samples import save_model

pytestmark = pytest.mark.long
NUM_GROUPS = 4


@contextlib.contextmanager
def reserved_batch() -> Iterator[tuple[str, int, list[int]]]:
    """A buffer with a reserved batch: its address, the learner's token and the tickets."""
    store = make_store(groups_per_step=NUM_GROUPS)
    with serving(store) as service, contextlib.closing(LearnerClient(service.address)) as learner:
        client = Client(ThreadRuntime(), service.address)
        token = learner.open("learner").token
        number = learner.register_version(0)
        client.call("describe_data", num_prompts=100, digest="digest")
        lease = client.call("lease", replica="a", version=number, want=NUM_GROUPS, wait_s=0.0).args
        for grant in lease["grants"]:
            frames = encode_group(make_group(grant["ticket"], grant["attempt"], number))
            client.call("push", frames, replica="a", ticket=grant["ticket"], attempt=grant["attempt"])
        batch = learner.reserve(0, 10.0)
        assert batch is not None
        yield service.address, token, [row.ticket for row in batch.tickets]
        client.close()


LAYOUTS: dict[str, dict[str, Any]] = {
    "tp_dp": {"tp": 2, "dp": 2},
    "tp_pp": {"tp": 2, "pp": 2},
    "pp_dp": {"pp": 2, "dp": 2},
    "cp_dp": {"cp": 2, "dp": 2},
    "dp": {"dp": 4},
    "fsdp2": {"backend": "fsdp2"},
}


def test_a_batch_leaves_the_buffer_once_whatever_the_layout_of_four_ranks(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", "qwen3", num_layers=4)
    with reserved_batch() as (address, token, tickets):
        share = {"kind": "fetched", "model": model, "address": address, "token": token, "tickets": tickets}
        jobs = [share | {"name": name, "changes": changes} for name, changes in LAYOUTS.items()]
        run_ranks(4, jobs, tmp_path)
    for name, changes in LAYOUTS.items():
        found = [json.loads((tmp_path / f"{name}.{rank}.json").read_text()) for rank in range(4)]
        num_shares = changes.get("dp", 4 if name == "fsdp2" else 1)
        assert sum(one["num_bytes"] > 0 for one in found) == num_shares, name
        whole = sum(size for one in found for size in one["fetched"].values())
        assert sum(one["num_bytes"] for one in found) == whole, "each group once"
        assert len({ticket for one in found for ticket in one["fetched"]}) == len(tickets)
        for share in range(num_shares):
            digests = [one["digest"] for one in found if one["share"] == share]
            assert len(digests) == 4 // num_shares and len(set(digests)) == 1, (name, share)
