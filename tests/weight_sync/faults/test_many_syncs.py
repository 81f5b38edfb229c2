"""Resources of each process: constant over hundreds of syncs, and over many faults."""

from __future__ import annotations

import pytest

from tests.weight_sync.faults.outcomes import bound_s, finish
from tests.weight_sync.faults.stage import Stage, running_stage
from tests.weight_sync.faults.traces import Holdings, descriptors_of, num_segments, settled_holdings_of

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
NUM_SYNCS = 500
WARM = 100
NUM_DEATHS = 12
SCALE, BUCKET_BYTES = 85, 256 << 10  # 1 MB
MAX_GROWTH_BYTES = 4 << 20
"""Over 400 syncs of 1 MB; what is kept of one sync would show as 400 MB, a manifest of one as 0.4 MB."""
MAX_MORE_DESCRIPTORS, MAX_MORE_THREADS, MAX_MORE_SEGMENTS = 20, 4, 1
"""A receiver that is behind for once opens a second segment, and joins a group of its own, which is kept."""


def holdings(stage: Stage) -> dict[str, Holdings]:
    names = [name for name in stage.names() if name.startswith("receiver")]
    return {name: settled_holdings_of(stage.party(name).pid) for name in ("coordinator", "publisher", *names)}


def segments_of(stage: Stage) -> dict[str, int]:
    parties = ["publisher", *(f"receiver.{index}" for index in stage.replicas)]
    return {party: num_segments(stage.cluster.shm_prefix, party) for party in parties}


def test_five_hundred_syncs_in_a_row_leave_every_process_as_it_was(tmp_path):
    with running_stage(tmp_path, scale=SCALE, bucket_bytes=BUCKET_BYTES) as stage:
        before: dict[str, Holdings] = {}
        segments_before: dict[str, int] = {}
        for number in range(1, NUM_SYNCS + 1):
            stage.publish(number)
            stage.wait_served(number, stage.replicas)
            if number == WARM:
                before, segments_before = holdings(stage), segments_of(stage)
        after = holdings(stage)
        for name, held in after.items():
            print(name, before[name], held)
            open_now, more = descriptors_of(stage.party(name).pid), MAX_MORE_DESCRIPTORS
            assert held.num_descriptors <= before[name].num_descriptors + more, f"{name}: {open_now}"
            assert held.num_threads <= before[name].num_threads + MAX_MORE_THREADS, name
            assert held.resident_bytes - before[name].resident_bytes <= MAX_GROWTH_BYTES, name
        for party, count in segments_of(stage).items():
            assert count <= segments_before[party] + MAX_MORE_SEGMENTS, party
        counters = stage.status("coordinator").counters
        assert counters.get("rounds_failed", 0) == 0 and not stage.blamed()
        assert all(len(stage.loads(index)) == NUM_SYNCS for index in stage.replicas)
        finish(stage)


def test_what_a_receiver_s_deaths_cost_the_others_does_not_add_up(tmp_path):
    with running_stage(tmp_path) as stage:
        stage.serve(1)
        number = 1
        held: list[dict[str, Holdings]] = []
        for num_deaths in range(1, NUM_DEATHS + 1):
            number += 1
            stage.arm("receiver.0", "kill", f"receiver.bucket@{number}.1", ("receiver.0",))
            stage.publish(number)
            stage.wait_for_strike("receiver.0")
            stage.wait_served(number, [1], bound_s(stage))
            stage.bring_back("receiver.0")
            stage.wait_served(number, [0], bound_s(stage))
            number += 1
            stage.publish(number)
            stage.wait_served(number, stage.replicas, bound_s(stage))
            if num_deaths in (4, NUM_DEATHS):
                held.append(holdings(stage))
        for name in ("coordinator", "publisher", "receiver.1"):
            early, late = held[0][name], held[1][name]
            assert late.num_descriptors <= early.num_descriptors + 2, held
            assert late.num_threads <= early.num_threads, held
            assert late.num_children == 0
        finish(stage)
