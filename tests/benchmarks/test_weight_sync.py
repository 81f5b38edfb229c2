"""The weight-sync benchmarks: their processes carry versions, their verdict is about all targets."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.reports.comparison import compare
from benchmarks.weight_sync import rounds as weight_sync
from benchmarks.weight_sync.peers.deaths import measure_death
from benchmarks.weight_sync.peers.joiners import measure_joiners
from benchmarks.weight_sync.peers.peers import WAIT_S
from benchmarks.weight_sync.peers.weights import count_bytes, make_weights
from benchmarks.weight_sync.rounds import make_fleet
from benchmarks.weight_sync.stripes import measure_stripes, parse_counts, share_of_bare
from weight_sync.direct.carrier import PACK_BYTES


def test_made_up_weights_have_about_the_bytes_asked_for_and_one_large_tensor() -> None:
    weights = make_weights(4 * 10**6)
    assert 0.9 < count_bytes(weights) / 4e6 < 1.5
    sizes = sorted(tensor.numel() for _, tensor in weights)
    assert len(sizes) == len({name for name, _ in weights}) > 3


def test_a_turn_times_a_whole_sync_and_every_other_way() -> None:
    row = weight_sync.measure_size(10**6, num_receivers=1, bucket_bytes=1 << 18, num_turns=1)
    assert all(
        len(row[f"{name}_s"]) == 1
        for name in ("transfer", "mapped", "direct", "publish", "copy", "digest", *weight_sync.WAYS)
    )
    stall = sum(row[f"direct_publish_{part}_s"][0] for part in weight_sync.STALL_PARTS)
    assert row["direct_publish_snapshot_s"][0] > 0
    assert stall == pytest.approx(row["direct_publish_s"][0], rel=0.2, abs=1e-3)
    stages = [row[f"direct_round/{stage}_s"][0] for stage in ("ordered", "carried", "told")]
    assert sum(stages) == pytest.approx(row["direct_s"][0], rel=1e-6)
    assert row["direct_round/packing_s"][0] <= row["direct_round/carried_s"][0]
    assert 0 < row["transfer_s"][0] < row["ready_s"][0]
    assert row["bucketed_s"][0] > 0


@pytest.mark.long
@pytest.mark.parametrize("path", weight_sync.PATHS)
def test_a_late_joiner_is_timed_from_its_hello_and_the_learner_s_steps_meanwhile(path: str) -> None:
    figures = measure_joiners(make_fleet(path, 1, 10**6, 1 << 18), num_joiners=1)
    assert {
        name: len(figures[name]) for name in ("sync_s", "hello_to_ready_s", "step_alone_s", "step_s")
    } == {
        "sync_s": 1,
        "hello_to_ready_s": 1,
        "step_alone_s": 1,
        "step_s": 1,
    }
    assert figures["hello_to_ready_s"][0] > 0 and figures["amid_s"] > 0


@pytest.mark.long
@pytest.mark.parametrize("path", weight_sync.PATHS)
def test_all_receivers_load_a_version_whose_sender_dies_in_the_middle_of_it(path: str) -> None:
    size = 10**6 if path == weight_sync.STAGED else 2 * PACK_BYTES
    figures = measure_death(make_fleet(path, 2, size, bucket_bytes=1 << 18))
    assert figures["sync_s"] > 0 and 0 < figures["hold_s"] < WAIT_S


@pytest.mark.long
def test_versions_of_several_publishers_are_timed_with_a_joiner_and_the_death_of_one() -> None:
    figures = measure_stripes(2, 10**6, bucket_bytes=1 << 18, num_turns=1, quick=False)
    assert share_of_bare(figures) > 0 and figures["joiner"]["amid_s"] > 0
    assert 0 < figures["death"]["hold_s"] < WAIT_S


def test_a_share_of_bare_groups_is_one_of_rates() -> None:
    figures = {"num_bytes": 50, "bare_bytes": 100, "bare_s": [1.0, 2.0], "transfer_s": [1.0, 2.0]}
    assert share_of_bare(figures) == 0.5
    assert parse_counts("1,4,4") == (1, 4)
    with pytest.raises(ValueError, match="0"):
        parse_counts("2,0")


def make_results(**changed: float) -> dict[str, Any]:
    row = {
        "num_bytes": 100 * 10**6,
        "num_receivers": 1,
        "first_transfer_s": 0.3,
        "transfer_s": [0.1, 0.1, 0.4],
        "mapped_s": [0.02, 0.02, 0.02],
        "direct_s": [0.1, 0.1, 0.1],
        "direct_publish_s": [0.04, 0.04, 0.04],
        "direct_ready_s": [0.2, 0.2, 0.2],
        "bucketed_s": [0.09, 0.09, 0.09],
        "tensors_s": [0.2, 0.2, 0.2],
        "memcpy_s": [0.02, 0.02, 0.02],
        "copy_s": [0.02, 0.02, 0.02],
        "digest_s": [0.012, 0.012, 0.012],
        "call_s": [0.001, 0.001, 0.001],
        "publish_s": [0.024, 0.024, 0.024],
        "ready_s": [0.2, 0.2, 0.2],
    }
    engine = {"pause_s": 0.1, "load_s": 0.09, "reload_s": 0.2, "tokens_per_s_alone": 100.0}
    engine |= {"tokens_per_s_during_transfers": 80.0, "transfer_share": 0.5}
    engine |= {name: value for name, value in changed.items() if name in engine}
    return {
        "quick": False,
        "bucket_bytes": 16 << 20,
        "keys": False,
        "rows": [row | {name: [value] * 3 for name, value in changed.items() if name in row}],
        "joiners": {
            path: {
                "num_bytes": 10**8,
                "sync_s": [0.2, 0.2],
                "hello_to_ready_s": [0.1, changed.get(f"late, {path}", 0.3)],
                "amid_s": changed.get(f"amid, {path}", 0.3),
                "step_alone_s": [0.02, 0.02],
                "step_s": [0.02, 0.022],
            }
            for path in weight_sync.PATHS
        },
        "deaths": {
            path: {"num_bytes": 10**8, "sync_s": 0.2, "hold_s": changed.get(f"dead, {path}", 1.0)}
            for path in weight_sync.PATHS
        },
        "stripes": {
            "2": {
                "num_bytes": 10**8,
                "bare_bytes": 10**8,
                "transfer_s": [0.2],
                "bare_s": [0.15],
                "joiner": {"hello_to_ready_s": [0.3], "amid_s": 0.4},
                "death": {"sync_s": 0.2, "hold_s": changed.get("dead stripe", 1.0)},
            }
        },
        "publish": [{"learner": "tensors", "num_bytes": 10**8, "ratio": changed.get("stall", 1.2)}],
        "engine": {"num_bytes": 10**8, "num_requests": 8, **{name: [engine[name]] for name in engine}},
        "vllm_clients": {"nccl": "RuntimeError: no GPU"},
    }


def test_figures_within_the_targets_pass_and_the_worst_is_named() -> None:
    is_met, verdict = weight_sync.check(make_results())
    assert is_met
    assert "worst ratio to a target: 1.12 (transfer and digest of bare gloo, 100 MB" in verdict


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"transfer_s": 0.13}, "transfer and digest of bare gloo"),
        ({"direct_s": 0.13}, "direct transfer of bare gloo"),
        ({"stall": 1.6}, "learner stall"),
        ({"pause_s": 0.15}, "pause of a local load"),
        ({"late, staged": 1.3}, "late joiner of a transfer, a load and 1 s, staged"),
        ({"amid, direct": 1.3}, "late joiner of a transfer, a load and 1 s, direct"),
        ({"dead, staged": 6.3}, "dead sender of a sync and 6 s, staged"),
        ({"dead, direct": 3.3}, "dead sender of a sync and 3 s, direct"),
        ({"dead stripe": 6.3}, "dead publisher of a sync and 6 s, 2 stripes"),
        ({"publish_s": 0.042}, "staged stall of a plain copy"),
        ({"direct_publish_s": 0.068}, "direct stall of a plain copy"),
    ],
    ids=str,
)
def test_every_target_can_be_missed(changed: dict[str, float], words: str) -> None:
    is_met, verdict = weight_sync.check(make_results(**changed))
    assert not is_met
    assert words in verdict


def test_a_version_of_one_bucket_is_judged_by_what_its_digest_and_a_call_leave() -> None:
    results = make_results(transfer_s=0.127)
    results["rows"][0] |= {"num_bytes": 10**7, "direct_round/packing_s": [0.01] * 3}
    assert weight_sync.rate_floor(results["rows"][0], weight_sync.STAGED) == pytest.approx(0.09 / 0.103)
    assert weight_sync.rate_floor(results["rows"][0], weight_sync.DIRECT) == pytest.approx(0.09 / 0.113)
    assert weight_sync.check(results)[0], "0.709 of bare gloo is 0.8 of what a digest and a call leave"
    results["rows"][0]["transfer_s"] = [0.13] * 3
    assert not weight_sync.check(results)[0]


def test_the_table_shows_ratios_the_engine_and_the_words_of_vllms_client() -> None:
    text = weight_sync.table(make_results())
    assert "0.9" in text
    assert "stripes 2, 100 MB to 1: 0.75 of as many bare groups at once" in text
    assert "pause 0.100 s, 1.11 of the same load at rest" in text
    assert "vLLM's trainer client nccl: RuntimeError: no GPU" in text


def test_a_row_has_the_ratios_of_each_turn() -> None:
    row, *rest = weight_sync.describe(make_results())
    assert row.case == {"megabytes": 100, "receivers": 1, "bucket_bytes": 16 << 20, "quick": False}
    assert row.values["gb_per_s"] == pytest.approx(1.0)
    assert row.values["of_bare_gloo"] == pytest.approx(0.9)
    assert row.values["stall"] == pytest.approx(1.2)
    assert row.spread["of_bare_gloo"] > 0
    assert {"joiners/staged/sync_s", "deaths/direct/hold_s", "engine/pause_s"} <= set(rest[0].values)


def test_rows_with_tags_and_without_share_no_case() -> None:
    plain, tagged = (weight_sync.describe(make_results() | {"keys": keys})[0] for keys in (False, True))
    assert compare([plain], [plain]) and not compare([plain], [tagged])


def test_rows_of_two_bucket_sizes_or_of_a_short_form_share_no_case() -> None:
    results = make_results()
    rows = weight_sync.describe(results)
    assert len(compare(rows, rows)) > 0
    for other in ({"bucket_bytes": 4 << 20}, {"quick": True}):
        assert compare(rows, weight_sync.describe(results | other)) == []


def test_the_picture_is_drawn(tmp_path: Any) -> None:
    weight_sync.draw(make_results(), tmp_path / "rates.png")
    assert (tmp_path / "rates.png").stat().st_size > 1000
