"""The arithmetic of the pipeline benchmark: the closed form, the figures of a window, the verdict."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from asyncrl.core.config.lengths import Lengths
from asyncrl.core.errors import ServiceFailed
from asyncrl.core.staleness import PolicyVersion, Span
from asyncrl.core.status.replica import EngineStatus
from benchmarks.harness.rows import RowFile
from benchmarks.pipeline import asynchrony as pipeline
from benchmarks.pipeline.asynchrony import (
    MIN_OF_IDEAL,
    SIGMAS,
    WAYS,
    check,
    compare,
    describe,
    make_rows,
    read_arguments,
    table,
)
from benchmarks.pipeline.bounded import Work, bounded_share
from benchmarks.pipeline.cases import (
    COLOCATED,
    REAL,
    SCRIPTED,
    SETTINGS,
    Case,
    Setting,
    Watch,
    make_config,
    make_task,
    start_services,
)
from benchmarks.pipeline.closed_form import (
    Split,
    StepTimes,
    asynchronous_s,
    colocated_s,
    disaggregated_s,
    draw_batches,
    tail_factor,
)
from benchmarks.pipeline.crew import Crew, placements_of, two_cores
from benchmarks.pipeline.sleepers import Pace, SleepingEngine
from benchmarks.pipeline.window import ESS, Sample, Window, read_window

TIMES = StepTimes(generation_s=2.0, training_s=1.0, tail=3.0, sync_s=0.5, exposed_sync_s=0.1)


def window(step_s: float, tokens: float = 1280.0, masked: float = 0.0, sync_s: float = 0.01) -> Window:
    shares = {"learner/wait": 0.5, "rollout/busy": 0.75, "lag_mean": 1.0, "lag_share/1": 1.0, "ess": 1.0}
    shares |= {"masked_share": 0.0, "requests_running": 16.0}
    trained = tokens - masked
    samples = ((step_s,) * 4, (trained / step_s, 2 * trained / step_s))
    return Window(4, step_s, tokens, trained, 0.2, 0.3, 3200.0, sync_s, *samples, shares)


def test_the_closed_form_takes_the_slower_side_on_its_share_of_the_cores() -> None:
    assert colocated_s(TIMES) == pytest.approx(3 * 2 + 1 + 0.5)
    assert disaggregated_s(TIMES, Split(8, 6, 2)) == pytest.approx(3 * 2 * 8 / 6 + 1 * 4 + 0.5)
    assert asynchronous_s(TIMES, Split(8, 6, 2)) == pytest.approx(4 + 0.1)
    assert asynchronous_s(TIMES, Split(8, 4, 4)) == pytest.approx(4 + 0.1)
    assert asynchronous_s(TIMES, Split(8, 2, 6)) == pytest.approx(8 + 0.1)


def test_without_skew_a_colocated_baseline_is_as_fast_as_the_ideal_on_a_balanced_split() -> None:
    flat = StepTimes(generation_s=1.0, training_s=1.0)
    assert colocated_s(flat) == asynchronous_s(flat, Split(2, 1, 1)) == 2.0


def test_skew_is_drawn_with_the_same_mean_and_a_longer_tail() -> None:
    tails, means = [], []
    for sigma in (0.0, 0.5, 1.0):
        batches = draw_batches(SCRIPTED.lengths(sigma), 100_000, SCRIPTED.rows)
        tails.append(tail_factor(batches))
        means.append(sum(map(sum, batches)) / sum(map(len, batches)))
    assert tails[0] == 1.0
    assert tails[0] < tails[1] < tails[2]
    assert means == pytest.approx([SCRIPTED.mean_tokens] * 3, rel=0.05)


def play(max_lag: int, sigma: float = 0.0, **changes: Any) -> float:
    work = Work(Lengths(sigma, 40.0), 4000, 4, 1, slots=4, tokens_per_s=100.0, train_s_per_token=0.001)
    return bounded_share(replace(work, **changes), max_lag, num_steps=50)


def test_without_skew_a_bound_of_one_step_costs_nothing_and_none_at_all_makes_both_sides_take_turns() -> None:
    # 4 answers of 40 tokens: 0.4 s to decode side by side, 0.16 s to train.
    assert play(0) == pytest.approx(0.4 / (0.4 + 0.16))
    assert play(1) == pytest.approx(1.0)
    assert play(1, train_s_per_token=0.005) == pytest.approx(1.0), "the learner is the slower side"


def test_a_bound_costs_what_waits_for_the_longest_answers_and_less_the_wider_it_is() -> None:
    shares = [play(max_lag, sigma=1.0) for max_lag in (0, 1, 2, 4, 8)]
    assert shares == sorted(shares) and shares[0] < 0.4 and shares[-1] > 0.95
    assert play(2, sigma=1.0, group_size=4, groups_per_step=1) < shares[2], "a group waits for its longest"


def test_the_price_of_a_bound_hardly_depends_on_the_draw() -> None:
    work = SCRIPTED.work(1.0)
    assert work is not None
    shares = [bounded_share(work, 2, num_steps=300, seed=seed) for seed in range(3)]
    assert max(shares) - min(shares) < 0.03


def test_a_learner_that_is_ten_times_slower_sets_the_pace() -> None:
    slow = replace(SCRIPTED, pace=Pace(100.0, 0.1))
    work = slow.work(0.0)
    assert work is not None and bounded_share(work, 8, num_steps=20) == pytest.approx(1.0)
    assert REAL.work(0.0) is None, "nothing sleeps"


def row(number: int, **figures: float) -> dict[str, float]:
    return {
        "time": 100.0 + number,
        "timing_s/step": 1.0,
        "timing_s/wait": 0.25,
        "timing_s/old_log_prob": 0.1,
        "timing_s/update_actor": 0.3,
        "weights/publish_s": 0.01,
        "timing_s/wait_publisher": 0.02,
        "staleness/trained_tokens": 90.0,
        "staleness/masked_tokens": 10.0,
        "staleness/lag_mean": 1.5,
        "response_length/max": 40.0,
        **figures,
    }


def sample(
    time_s: float, tokens: int, busy_s: float, lease_s: float, running: int = 0, dropped: int = 0
) -> Sample:
    engine = EngineStatus(
        in_flight_requests=running,
        tokens=tokens,
        trajectories=0,
        busy_s=busy_s,
        idle_by_cause={"lease": lease_s},
        swaps=0,
        last_swap_s=0.0,
    )
    return Sample(time_s, {"rollout.0": engine}, dropped)


def test_a_window_is_of_the_steps_after_the_first_ones_and_leaves_the_rest_out() -> None:
    rows = [row(0), row(1, **{"staleness/trained_tokens": 1e6}), *(row(number) for number in range(2, 6))]
    samples = [
        sample(100.9, 1000, 10.0, 5.0, running=8, dropped=3),
        sample(103.0, 5, 5, 5),
        sample(105.1, 1441, 13.15, 6.05, running=4, dropped=5),
        sample(107.0, 9999, 99, 99, running=99, dropped=99),
    ]
    found = read_window(rows, samples, 2)
    assert (found.num_steps, found.step_s, found.tokens, found.trained_tokens) == (4, 1.0, 100.0, 90.0)
    assert found.tokens_per_busy_s == pytest.approx(441 / 3.15)
    assert found.generation_s == pytest.approx(100 / (441 / 3.15))
    assert found.training_s == pytest.approx(0.4)
    assert found.shares["rollout/busy"] == pytest.approx(3.15 / 4.2)
    assert found.shares["rollout/lease"] == pytest.approx(1.05 / 4.2)
    assert found.shares["learner/wait"] == pytest.approx(0.25)
    assert found.shares["masked_share"] == pytest.approx(0.1)
    assert found.exposed_sync_s == pytest.approx(0.03), "0.01 s of handing over, 0.02 s of waiting to"
    assert found.trained_samples_per_s == (90.0,) * 4
    # 441 tokens in 4.2 s, 100 per step of 1 s were handed to the learner.
    assert found.shares["unused_tokens_per_step"] == pytest.approx(5.0)
    assert found.shares["dropped_groups_per_step"] == pytest.approx(2 / 4)
    assert found.shares["requests_running"] == pytest.approx(6.0), "over the moments with any"
    assert "ess" not in found.shares, "this correction makes none"
    with_ess = read_window([row(0), *(row(number, **{ESS: 0.5}) for number in range(1, 6))], samples, 2)
    assert with_ess.shares["ess"] == 0.5


def scripted(way: str, found: Window, sigma: float = 1.0) -> dict[str, Any]:
    return describe(Case("scripted", sigma, way), found)


def test_speed_ups_compare_equal_tokens_and_the_ideal_is_of_the_cases_own_rates() -> None:
    cases = compare([scripted("0", window(2.0)), scripted("4", window(0.5, tokens=2560.0, masked=640.0))])
    fast = cases[1]
    assert fast["speed_up_over_disaggregated"] == pytest.approx(8.0)
    assert fast["trained_speed_up_over_disaggregated"] == pytest.approx(6.0)
    # 2,560 tokens at 32 x 100 per second, and the learner's 0.8 of that; 0.01 s of a sync are exposed.
    assert fast["ideal_step_s"] == pytest.approx(0.81)
    assert fast["share_of_ideal"] == pytest.approx(0.81 / 0.5)
    assert "speed_up_over_colocated" not in fast
    assert "share_of_ideal" not in cases[0]


def test_only_asynchrony_of_two_steps_and_more_is_held_to_the_ideal() -> None:
    slow, base = window(4.0), scripted("0", window(2.0))
    cases = compare([base, scripted("1", slow), scripted(COLOCATED, slow), scripted("2", window(0.46))])
    is_met, verdict = check({"cases": cases, "quick": False})
    assert is_met, verdict
    is_met, verdict = check({"cases": compare([base, scripted("2", slow)]), "quick": False})
    assert not is_met
    assert "0.10 of the ideal, 0.13 of what the bound leaves, scripted, sigma 1, max_lag 2" in verdict


def test_the_price_of_the_bound_is_not_the_systems_own_loss() -> None:
    base = scripted("0", window(2.0))
    cases = compare([base, scripted("2", window(1.4))])
    bounded = cases[1]["bounded_share"]
    assert bounded == pytest.approx(0.81, abs=0.01)
    assert cases[1]["share_of_ideal"] < 0.9 * MIN_OF_IDEAL
    assert cases[1]["share_of_bounded"] == pytest.approx(cases[1]["share_of_ideal"] / bounded)
    for other in (base, describe(Case("real", 1.0, "2"), window(1.0))):
        assert "bounded_share" not in other


def test_real_parts_are_judged_by_trained_tokens_at_sigma_1() -> None:
    def real(way: str, step_s: float, masked: float = 0.0) -> dict[str, Any]:
        return describe(Case("real", 1.0, way), window(step_s, masked=masked))

    cases = compare([real("0", 1.0), real("4", 0.6)])
    assert check({"cases": cases, "quick": True})[0]
    cases = compare([real("0", 1.0), real("4", 0.6, masked=256.0)])
    assert not check({"cases": cases, "quick": True})[0]
    assert not check({"cases": [], "quick": True})[0]
    alone = check({"cases": compare([real("4", 0.6)]), "quick": False})
    assert alone == (False, "no judged case was measured"), "there is nothing to compare it with"


def test_weights_that_are_handed_over_at_a_snails_pace_are_not_part_of_an_ideal() -> None:
    cases = compare([scripted("0", window(2.0)), scripted("4", window(0.7, sync_s=0.3))])
    assert cases[1]["share_of_ideal"] == pytest.approx(1.0)
    is_met, verdict = check({"cases": cases, "quick": False})
    assert not is_met
    assert "300.0 ms of a step for handing weights over, scripted, sigma 1, max_lag 4" in verdict


def test_streaming_must_not_be_slower_where_it_has_something_to_hide() -> None:
    slow = describe(Case("scripted", 1.0, "0", streams=True), window(2.5))
    is_met, verdict = check({"cases": compare([scripted("0", window(2.0)), slow]), "quick": False})
    assert not is_met
    assert "0.80 times as fast with stream" in verdict


def test_a_case_that_was_refused_is_a_target_that_was_missed() -> None:
    cases = compare([scripted("0", window(2.0)), scripted("4", window(0.42))])
    assert check({"cases": cases, "quick": False})[0]
    verdict = check({"cases": cases, "quick": False, "refused": ["real-1-4 was refused: why"]})
    assert verdict == (False, "real-1-4 was refused: why")


@pytest.mark.parametrize("flags", [["--sigmas", "1", "--ways", "0,4"], ["--quick"]])
def test_a_case_that_failed_leaves_the_others_and_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flags: list[str]
) -> None:
    def run_case(case: Case, task: Path, folder: Path, turns: list[Any], say: Any) -> list[Window]:
        if case.engine == "real":
            raise ServiceFailed("buffer ended with 1\nTraceback\nMemoryError")
        return [window(1.0) for _ in turns]

    monkeypatch.setattr(pipeline, "run_case", run_case)
    monkeypatch.setattr(pipeline, "end_on_sigterm", lambda: None)
    assert pipeline.main([*flags, "--json", f"{tmp_path}/a.json"]) == 1
    file = RowFile.read(tmp_path / "a.json")
    assert file.rows and {row.case["engine"] for row in file.rows} == {"scripted"}
    failed = file.figures["failed"]
    assert failed[0].startswith("real") and failed[0].endswith(" failed: buffer ended with 1")
    assert check(file.figures) == (False, failed[0])
    assert "MemoryError" in capsys.readouterr().err


def test_the_replicas_of_a_batch_share_it_evenly() -> None:
    for case in (Case("real", 1.0, COLOCATED), Case("real", 1.0, "0"), Case("scripted", 1.0, COLOCATED)):
        rollout = make_config(case, Path("task"), Path("runs")).rollout
        assert rollout.replicas.min * rollout.max_sequences == case.setting.rows


def test_a_streaming_case_is_compared_with_the_baseline_that_does_not_stream() -> None:
    cases = [
        describe(Case("real", 1.0, "0"), window(1.0)),
        describe(Case("real", 1.0, "0", streams=True), window(0.5)),
    ]
    assert compare(cases)[1]["speed_up_over_disaggregated"] == pytest.approx(2.0)


def test_table_and_rows_hold_every_case() -> None:
    results = {"cases": compare([scripted("0", window(2.0)), scripted("4", window(0.5))]), "quick": True}
    assert len(table(results).splitlines()) == 3
    rows = make_rows(results)
    assert [one.case["way"] for one in rows] == ["max_lag 0", "max_lag 4"]
    assert rows[1].values["step_s"] == 0.5
    assert rows[1].spread["step_s"] == 0.0
    assert rows[1].spread["trained_tokens_per_s"] > 0
    assert rows[1].values["slots_filled"] == 0.5


def test_sides_have_cores_of_their_own_unless_they_take_turns() -> None:
    names = ("rollout.0", "receiver.0", "learner.0", "buffer.0")
    first, second = two_cores()
    placements = placements_of(names, {}, shares_cores=False)
    assert [placements[name].cores for name in names] == [first, first, second, second]
    both = placements_of((*names, "rollout.1"), {}, shares_cores=True)
    assert (both["rollout.0"].cores, both["rollout.1"].cores) == (first, second)
    assert both["buffer.0"].cores == frozenset()


def test_an_engine_that_sleeps_says_which_version_was_there_when_each_token_came() -> None:
    engine = SleepingEngine(tokens_per_s=160.0, slots=1)
    began_s = 1000.0
    engine._versions += [PolicyVersion(number, number) for number in (1, 2, 3, 4)]
    engine._swapped_s += [0.0, 500.0, began_s + 0.0625, began_s + 99.0]
    assert engine._spans(began_s, 20) == (Span(2, 0, 10), Span(3, 10, 20))


def test_the_command_line_names_engines_skews_and_ways() -> None:
    given = read_arguments(["--engine", "real", "--sigmas", "0,1", "--ways", "0,colocated,16"])
    assert (given.engine, given.sigmas, given.ways) == ("real", (0.0, 1.0), ("0", COLOCATED, "16"))
    given = read_arguments(["--quick"])
    assert (given.quick, given.sigmas, given.ways) == (True, SIGMAS, WAYS)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--ways", "x"], "'x' is neither colocated nor a max_lag"),
        (["--ways", "0,-1"], "'-1' is neither"),
        (["--sigmas", "x"], "no numbers between commas"),
        (["--sigmas", "nan"], "a sigma is from 0 to 4"),
        (["--quick", "--sigmas", "0"], "--quick has its own skew"),
    ],
)
def test_a_command_line_that_cannot_be_followed_is_refused(
    flags: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        read_arguments(flags)
    assert says in capsys.readouterr().err


def test_the_closed_form_is_of_stated_times_and_not_of_the_step_that_was_measured() -> None:
    found = []
    for step_s in (2.0, 20.0):
        cases = [scripted(way, window(step_s)) for way in ("0", COLOCATED)]
        fast = compare([*cases, scripted("4", window(0.5))])[2]
        found.append((fast["closed_form_over_disaggregated"], fast["closed_form_over_colocated"]))
        # 1,280 tokens at 32 x 100 per second; 0.8 of that; what the learner hands over takes 0.05 s.
        g_s, t_s, tail = 0.4, 0.32, fast["tail"]
        assert found[-1][0] == pytest.approx((tail * g_s + t_s + 0.01) / (g_s + 0.01))
        assert found[-1][1] == pytest.approx((tail * g_s / 2 + t_s / 2 + 0.01) / (g_s + 0.01))
    assert found[0] == found[1]


def test_the_row_of_a_case_has_the_median_of_its_steps_and_their_mean_beside_it() -> None:
    skewed = replace(window(2.0), step_samples_s=(1.0, 1.0, 1.0, 5.0))
    [found] = make_rows({"cases": compare([scripted("0", skewed)]), "quick": True})
    assert (found.values["step_s"], found.values["step_mean_s"]) == (1.0, 2.0)


@pytest.mark.long
def test_a_crew_of_sleepers_makes_steps_and_leaves_nothing_behind(tmp_path: Path) -> None:
    case = Case("scripted", 0.0, "2")
    with Crew(make_config(case, make_task(tmp_path / "task"), tmp_path), tmp_path / "run") as crew:
        watch = Watch(crew, start_services(crew, case))
        watch.follow(2)
        pids = [process.pid for process in crew._processes.values()]
        assert crew._sockets.is_dir()
        assert any(crew._run_id in path.name for path in Path("/dev/shm").iterdir())
    assert len(watch.rows) >= 2
    assert [pid for pid in pids if psutil.pid_exists(pid)] == []
    assert not crew._sockets.exists()
    assert [path.name for path in Path("/dev/shm").iterdir() if crew._run_id in path.name] == []


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
def test_a_setting_keeps_its_mean_length_whatever_the_skew(setting: Setting) -> None:
    for sigma in (0.0, 0.5, 1.0):
        draws = draw_batches(setting.lengths(sigma), 1_000_000, setting.rows, batches=400)
        mean = sum(map(sum, draws)) / sum(map(len, draws))
        assert mean == pytest.approx(setting.mean_tokens, rel=0.05)
