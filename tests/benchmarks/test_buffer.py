"""The buffer's benchmark: its processes carry what they should, its verdict is about all targets."""

from __future__ import annotations

import itertools
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from asyncrl.core.errors import ServiceFailed
from benchmarks.buffer.peers.crew import Crew, Figures, PeerMissing, make_environment
from benchmarks.buffer.peers.load import Log, Turn, pace
from benchmarks.buffer.throughput import GROUP_SIZE, Comparison, cells, check, read_arguments, systems, table


@pytest.mark.parametrize(
    ("way", "options", "shape", "groups_per_s"),
    [
        pytest.param(("zmq_pipe", "ZmqPipe"), {}, (1, 1), 0.0, marks=pytest.mark.long),
        (("ours", "Ours"), {"journal": "file"}, (1, 1), 20.0),
        pytest.param(("ours", "Ours"), {"journal": "none"}, (2, 2), 0.0, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_a_turn_delivers_and_counts(
    way: tuple[str, str], options: dict[str, Any], shape: tuple[int, int], groups_per_s: float
) -> None:
    crew = Crew(f"benchmarks.buffer.peers.{way[0]}", way[1])
    try:
        turn = Turn("t", 64, 2, *shape, groups_per_s=groups_per_s, per_entry=2, options=options)
        figures = crew.run(turn, 0.6, 1.2 if groups_per_s else 0.4)
    finally:
        crew.close()
    assert figures.per_s > 0
    if groups_per_s:
        assert 0 < len(figures.latencies_s) <= groups_per_s * figures.seconds + 1, "no more was due"
        assert min(figures.latencies_s) > 0


def test_a_turn_in_which_nothing_came_is_run_again_and_twice_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[Turn] = []

    def run(crew: Crew, turn: Turn, seconds: float, warm_s: float) -> Figures:
        turns.append(turn)
        return Figures(5.0 if len(turns) == 3 else 0.0, 1.0, seconds)

    monkeypatch.setattr(Crew, "_run", run)
    crew = Crew("no.such.module", "NoWay")
    assert crew.run(Turn("t", 64, 2), 0.5, 0.0).seconds == 2.0
    assert len({turn.name for turn in turns}) == 3, "a turn begins with nothing of the one before"
    with pytest.raises(ServiceFailed, match="nothing was delivered within 32 s"):
        crew.run(Turn("t", 64, 2), 0.5, 0.0)


def test_a_paced_turn_without_a_latency_is_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = [Figures(5.0, 1.0, 0.5), Figures(5.0, 1.0, 1.0, (0.1,))]
    monkeypatch.setattr(Crew, "_run", lambda *_: taken.pop(0))
    crew = Crew("no.such.module", "NoWay")
    assert crew.run(Turn("t", 64, 2, groups_per_s=1.0), 0.5, 0.0).latencies_s == (0.1,)
    taken[:] = [Figures(5.0, 1.0, 0.5)]
    assert not crew.run(Turn("t", 64, 2), 0.5, 0.0).latencies_s, "nothing paces it"


def test_a_producer_that_is_late_names_the_time_when_an_entry_was_due() -> None:
    start_s = time.monotonic() - 100.0
    turn = Turn("t", 64, 2, 2, start_s=start_s, stop_s=start_s + 1000.0, groups_per_s=1.0, per_entry=2)
    log = Log()
    sent = list(itertools.islice(pace(turn, 1, log), 20))
    assert sent == [(serial, 2 * serial + 2) for serial in range(20)]
    dues = [log.times[number] - start_s for _, number in sent]
    assert dues == pytest.approx([2.0 * serial + 1.0 for serial in range(20)])


def make_results(**changed: dict[str, Any]) -> dict[str, Any]:
    per_s = {"pipe": 1000.0, "xadd": 100.0, "none": 500.0, "file": 400.0, "redis": 90.0}
    rows = [
        {
            "system": name,
            "size": "4k",
            "shape": "1x1",
            "missing": "",
            "per_s": per_s.get(name, 10.0),
            "cpu_s_per_1000": 1.0,
            "p50_s": 0.001,
            "p99_s": 0.005,
            "num_latencies": 10,
            **changed.get(name, {}),
        }
        for name in systems()
    ]
    return {
        "quick": False,
        "rows": rows,
        "titles": {name: system.title for name, system in systems().items()},
    }


def test_figures_within_the_targets_pass_and_the_worst_is_named() -> None:
    is_met, verdict = check(make_results())
    assert is_met
    assert "worst ratio to a target: 1.25 (none of the pipe" in verdict


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"none": {"per_s": 390.0}}, "none of the pipe"),
        ({"file": {"per_s": 200.0}}, "file of none"),
        ({"redis": {"per_s": 45.0}}, "redis of bare XADD"),
        ({"file": {"p99_s": 0.02}}, "p99 of file"),
        ({"ray_queue": {"per_s": 120.0}}, "of ray_queue"),
        ({"redis": {"per_s": 60.0}, "pattern": {"per_s": 20.0}}, "redis of pattern"),
        ({"pattern": {"missing": "pip: no such thing"}}, "not measured at 4k 1x1: pattern"),
    ],
    ids=str,
)
def test_every_target_can_be_missed(changed: dict[str, dict[str, Any]], words: str) -> None:
    is_met, verdict = check(make_results(**changed))
    assert not is_met
    assert words in verdict


def test_a_path_whose_bare_transport_is_not_four_times_the_best_peer_is_judged_by_its_share_of_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    results = make_results(pattern={"per_s": 30.0}, none={"per_s": 900.0}, file={"per_s": 800.0})
    is_met, _ = check(results)
    assert is_met, "90 of 30 is 3 times, and bare XADD 3.3 times"
    printed = capsys.readouterr().out
    assert "  3.33  xadd, bare, of pattern" in printed and "  3.00  redis of pattern" in printed
    assert "redis of pattern, the best peer, target" not in printed
    assert not check(make_results(pattern={"per_s": 30.0}, redis={"per_s": 45.0}))[0]


def test_the_judged_cell_comes_first_and_a_quick_run_has_no_other() -> None:
    assert cells(read_arguments([]))[0] == ("4k", "1x1")
    assert len(set(cells(read_arguments([])))) == 8
    assert cells(read_arguments(["--quick"])) == [("4k", "1x1")]


@pytest.mark.long
def test_latencies_are_taken_at_half_of_what_the_same_run_measured(tmp_path: Path) -> None:
    comparison = Comparison({"none": systems()["none"]}, tmp_path, None)
    try:
        (row,) = comparison.measure("1k", "1x1", 1, 0.3, ["none"])
    finally:
        comparison.close()
    values, paced = row.as_values(), row.paced
    assert values["offered_per_s"] == pytest.approx(values["per_s"] / 2)
    assert paced is not None
    assert 0 < values["num_latencies"] <= values["offered_per_s"] / GROUP_SIZE * paced.seconds + 1


def test_a_quick_run_is_judged_without_the_peers_that_it_leaves_out() -> None:
    results = make_results(transfer_queue={"missing": "left out"}, ray_queue={"missing": "left out"})
    assert not check(results)[0]
    assert check({**results, "quick": True})[0]


def test_reverb_may_be_missing_and_its_row_says_why() -> None:
    results = make_results(reverb={"missing": "pip: ERROR: no matching distribution"})
    assert check(results)[0]
    assert "no matching distribution" in table(results)


def test_a_peer_that_cannot_be_installed_is_reported_in_pips_words(tmp_path: Any) -> None:
    assert make_environment("ours", (), tmp_path) == sys.executable
    with pytest.raises(PeerMissing, match="pip: ERROR"):
        make_environment("broken", (f"broken @ file://{tmp_path}/nothing.whl",), tmp_path)
