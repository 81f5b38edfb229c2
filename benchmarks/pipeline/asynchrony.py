"""Gain of asynchrony: the same work synchronously and at `max_lag` 1, 2, 4, 8, on the same two cores.

    asyncrl bench pipeline [--engine scripted|real] [--sigmas 0,1] [--ways colocated,0,4] [--quick] [--check]

Generation has a core of its own and training another one (buffer and publisher are on the latter). Two
baselines are synchronous: `max_lag` 0, each side on its core and idle in turn, and `colocated`, both sides on
both cores in turn. All cases of an engine and skew train the same number of rows of the same distribution of
lengths: fixed, or log-normal with the same mean. Speed-ups compare tokens per second, so that a window of
steps with shorter answers gains nothing; the judged speed-up counts trained tokens only, not masked ones.
Scripted: engine and model sleep at stated rates. The gap to the closed form has two parts: the price of the
bound, simulated in `pipeline_parts/bounded.py`, and the system's own loss, which is judged.
Real: vLLM and Megatron-core; g, t and s are those of the very run that is judged, under its contention.

A case that failed leaves the others: it is named, and the exit code is 1. A full run takes about 25 minutes;
`--quick` takes sigma 1 and `max_lag` 0 and 4 with few steps, the real ones in one run whose bound is moved:
under a minute.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from asyncrl.core.errors import ConfigError, ServiceFailed
from benchmarks.harness.options import Verdict, end_on_sigterm, judge, make_parser, report
from benchmarks.harness.rows import Row, spread_of
from benchmarks.pipeline.bounded import bounded_share
from benchmarks.pipeline.cases import COLOCATED, SETTINGS, Case, make_task, run_case
from benchmarks.pipeline.closed_form import (
    Split,
    StepTimes,
    asynchronous_s,
    colocated_s,
    disaggregated_s,
    draw_batches,
    tail_factor,
)
from benchmarks.pipeline.crew import two_cores
from benchmarks.pipeline.window import BUSY, Window

SIGMAS = (0.0, 0.5, 1.0, 1.5)
WAYS = ("0", COLOCATED, "1", "2", "4", "8")
SYNCHRONOUS = ("0", COLOCATED)
JUDGED_SIGMA, JUDGED_WAY = 1.0, "4"
STREAMED = ("0", "4")
STEPS = {"scripted": (12, 24), "real": (16, 32)}
QUICK_STEPS = {"scripted": (4, 8), "real": (6, 12)}
"""Measured steps of a synchronous and of an asynchronous case."""
OWN_CORES = Split(total=1, generating=1, training=1)
"""Of times that were measured with each side on its own core: nothing is left to convert."""
MAX_SIGMA = 4.0
MIN_OF_IDEAL, MIN_SPEED_UP = 0.9, 1.5
MAX_EXPOSED_SHARE = 0.05
"""Of a scripted step, for handing weights over: the ideal has it too, so it is judged by itself."""

Figures = dict[str, Any]
Say = Callable[[str], None]
Take = tuple[str, Callable[[], list[Figures]]]
"""Name of a run, and the function that measures its cases."""


def main(arguments: Sequence[str]) -> int:
    """Measure as the command line says and return the exit code."""
    given = read_arguments(arguments)
    end_on_sigterm()  # no service of a run must outlive this
    results = measure(given, lambda sentence: print(sentence, file=sys.stderr, flush=True))
    return report(given, results, table, check, make_rows(results)) or int(bool(results["failed"]))


def read_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = make_parser("asyncrl bench pipeline", __doc__, "sigma 1, max_lag 0 and 4, few steps")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--engine", choices=[*SETTINGS, "both"], default="both")
    parser.add_argument("--sigmas", type=_read_sigmas, help=",".join(f"{sigma:g}" for sigma in SIGMAS))
    parser.add_argument("--ways", type=_read_ways, help=f"{','.join(WAYS)}; any other max_lag too")
    given = parser.parse_args(arguments)
    if given.quick and (given.sigmas or given.ways):
        parser.error("--quick has its own skew and ways: give it, or --sigmas and --ways")
    given.sigmas, given.ways = given.sigmas or SIGMAS, given.ways or WAYS
    return given


def _read_sigmas(text: str) -> tuple[float, ...]:
    try:
        sigmas = tuple(map(float, text.split(",")))
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' are no numbers between commas") from None
    if not all(0 <= sigma <= MAX_SIGMA for sigma in sigmas):
        raise argparse.ArgumentTypeError(f"'{text}': a sigma is from 0 to {MAX_SIGMA:g}")
    return sigmas


def _read_ways(text: str) -> tuple[str, ...]:
    ways = tuple(text.split(","))
    unknown = [way for way in ways if way != COLOCATED and not (way.isascii() and way.isdigit())]
    if unknown:
        raise argparse.ArgumentTypeError(f"'{unknown[0]}' is neither {COLOCATED} nor a max_lag")
    return ways


def measure(given: argparse.Namespace, say: Say) -> Figures:
    """Run all cases and return the figures of those that made steps; the others are named in them."""
    engines = list(SETTINGS) if given.engine == "both" else [given.engine]
    cases: list[Figures] = []
    refused: list[str] = []
    failed: list[str] = []
    with tempfile.TemporaryDirectory(prefix="asyncrl-bench-") as place:
        folder = Path(place)
        task = make_task(folder / "task")
        for engine in engines:
            for name, take in _takes(given, engine, task, folder, say):
                try:
                    cases += take()
                except ConfigError as error:
                    refused.append(f"{name} was refused: {error}")
                    say(refused[-1])
                except ServiceFailed as error:
                    say(f"{name} failed: {error}")
                    failed.append(f"{name} failed: {str(error).splitlines()[0]}")
    return {
        "benchmark": "pipeline",
        "quick": given.quick,
        "cores": _num_cores(),
        "settings": {engine: _describe(engine) for engine in engines},
        "cases": compare(cases),
        "refused": refused,
        "failed": failed,
    }


def _takes(given: argparse.Namespace, engine: str, task: Path, folder: Path, say: Say) -> Iterator[Take]:
    """Yield what is to be run of an engine: its name, and what measures it."""
    if given.quick and engine == "real":
        yield engine, partial(_measure_in_turns, engine, task, folder, say)
        return
    for case in _cases(given, engine):
        yield case.name, partial(_measure_alone, case, given.quick, task, folder, say)


def _cases(given: argparse.Namespace, engine: str) -> Iterator[Case]:
    if given.quick:
        yield from (Case(engine, JUDGED_SIGMA, way) for way in ("0", JUDGED_WAY))
        return
    for sigma in given.sigmas:
        for way in given.ways:
            yield Case(engine, sigma, way)
            if sigma == JUDGED_SIGMA and way in STREAMED:
                yield Case(engine, sigma, way, streams=True)


def _measure_alone(case: Case, quick: bool, task: Path, folder: Path, say: Say) -> list[Figures]:
    """Return the figures of a case that has a run of its own.

    Raises:
        ConfigError: The configuration of the case is refused.
        ServiceFailed: A service of the run ended, or made no steps.
    """
    steps = (QUICK_STEPS if quick else STEPS)[case.engine][case.way not in SYNCHRONOUS]
    [window] = run_case(case, task, folder / case.name, [(case.max_lag, steps)], say)
    return [describe(case, window)]


def _measure_in_turns(engine: str, task: Path, folder: Path, say: Say) -> list[Figures]:
    """Return the figures of both bounds of one run: a bound of 0 admits as a run of `max_lag` 0 does.

    Raises:
        ServiceFailed: A service of the run ended, or made no steps.
    """
    case = Case(engine, JUDGED_SIGMA, JUDGED_WAY)
    sync_steps, async_steps = QUICK_STEPS[engine]
    turns = [(case.max_lag, async_steps), (0, sync_steps)]
    windows = run_case(case, task, folder / engine, turns, say)
    ways = [JUDGED_WAY, "0"]
    return [
        describe(Case(engine, case.sigma, way), window) for way, window in zip(ways, windows, strict=True)
    ]


def _describe(engine: str) -> Figures:
    setting = SETTINGS[engine]
    told = {"rows": setting.rows, "mean_tokens": setting.mean_tokens, "max_tokens": setting.max_tokens}
    pace = setting.pace
    if pace is None:
        return told
    return told | {"tokens_per_s": pace.tokens_per_s, "train_s_per_token": pace.train_s_per_token}


def _num_cores() -> int:
    """Return how many cores both sides have together."""
    first, second = two_cores()
    return len(first | second)


def describe(case: Case, window: Window) -> Figures:
    """Return a case's own figures; tokens of prompts count nowhere.

    `generation_s` (g) and `training_s` (t) of a scripted case are known, and measured where nothing sleeps.
    """
    setting, pace = case.setting, case.setting.pace
    lengths = setting.lengths(case.sigma)
    known = {"generation_s": window.generation_s, "training_s": window.training_s}
    if pace is not None:
        factor = 2 if case.way == COLOCATED else 1
        known["generation_s"] = window.tokens / (setting.rows * pace.tokens_per_s * factor)
        known["training_s"] = window.tokens * pace.train_s_per_token / factor
    return {
        "case": {
            "engine": case.engine,
            "sigma": case.sigma,
            "way": f"max_lag {case.way}" if case.way != COLOCATED else COLOCATED,
            "stream": int(case.streams),
        },
        "tail": tail_factor(draw_batches(lengths, setting.max_tokens, setting.rows)),
        "num_steps": window.num_steps,
        "step_s": window.step_s,
        "step_samples_s": list(window.step_samples_s),
        "tokens_per_step": window.tokens,
        "tokens_per_s": window.tokens / window.step_s,
        "trained_tokens_per_s": window.trained_tokens / window.step_s,
        "trained_samples_per_s": list(window.trained_samples_per_s),
        "trained_tokens_per_s_and_core": window.trained_tokens / window.step_s / _num_cores(),
        "masked_tokens_per_step": window.tokens - window.trained_tokens,
        "learner_idle_share": window.shares["learner/wait"],
        "rollout_idle_share": 1 - window.shares[f"rollout/{BUSY}"],
        "busy_s": window.busy_s,
        "slots_filled": window.shares["requests_running"] / setting.rows,
        **known,
        "exposed_sync_s": window.exposed_sync_s,
        **window.shares,
        **_price_of_bound(case),
    }


def _price_of_bound(case: Case) -> Figures:
    """Return the share of the ideal that a system without any cost of its own has under the case's bound."""
    work = case.setting.work(case.sigma)
    if work is None or case.way in SYNCHRONOUS or case.streams:
        return {}
    return {"bounded_share": bounded_share(work, case.max_lag)}


def compare(cases: Sequence[Figures]) -> list[Figures]:
    """Add speed-ups over both baselines of the same engine and skew, and how close they come to the ideal.

    The ideal is the closed form with the synchronous step as it was measured (tau g + t + s and what the
    system adds), brought to the case's tokens, over max(g, t) + s_exposed of the case itself. `closed_form_…`
    is that form of stated or measured g, t, tau and s alone, no synchronous step measured: s is what the
    synchronous learner spent on handing weights over.
    """
    return [case | _compared(case, cases) for case in cases]


def _compared(case: Figures, cases: Sequence[Figures]) -> Figures:
    found: Figures = {}
    for name, way in (("disaggregated", "max_lag 0"), ("colocated", COLOCATED)):
        base = _find(cases, case["case"] | {"way": way, "stream": 0})
        if base is not None:
            found[f"speed_up_over_{name}"] = case["tokens_per_s"] / base["tokens_per_s"]
            found[f"trained_speed_up_over_{name}"] = (
                case["trained_tokens_per_s"] / base["trained_tokens_per_s"]
            )
    if case["case"]["way"] in ("max_lag 0", COLOCATED):
        return found
    times = StepTimes(case["generation_s"], case["training_s"], exposed_sync_s=case["exposed_sync_s"])
    found["ideal_step_s"] = asynchronous_s(times, OWN_CORES)
    found["share_of_ideal"] = found["ideal_step_s"] / case["step_s"]
    if "bounded_share" in case:
        found["share_of_bounded"] = found["share_of_ideal"] / case["bounded_share"]
    for name in ("disaggregated", "colocated"):
        if f"speed_up_over_{name}" in found:
            ideal = found[f"speed_up_over_{name}"] / found["share_of_ideal"]
            found[f"ideal_over_{name}"] = ideal
    return found | _closed_form(case, cases, found["ideal_step_s"])


def _closed_form(case: Figures, cases: Sequence[Figures], ideal_step_s: float) -> Figures:
    """Return the closed-form speed-ups over the baselines that there are, from the case's own g and t."""
    found: Figures = {}
    g_s, t_s, tail = case["generation_s"], case["training_s"], case["tail"]
    apart = _find(cases, case["case"] | {"way": "max_lag 0", "stream": 0})
    together = _find(cases, case["case"] | {"way": COLOCATED, "stream": 0})
    if apart is not None:
        times = StepTimes(g_s, t_s, tail, sync_s=apart["exposed_sync_s"])
        found["closed_form_over_disaggregated"] = disaggregated_s(times, OWN_CORES) / ideal_step_s
    if together is not None:  # g and t are those of one core of two
        times = StepTimes(g_s / 2, t_s / 2, tail, sync_s=together["exposed_sync_s"])
        found["closed_form_over_colocated"] = colocated_s(times) / ideal_step_s
    return found


def _find(cases: Sequence[Figures], wanted: Mapping[str, Any]) -> Figures | None:
    return next((case for case in cases if case["case"] == wanted), None)


COLUMNS = {
    "step s": ("step_s", 1.0, "7.3f"),
    "tok/s": ("trained_tokens_per_s", 1.0, "7.0f"),
    "/core": ("trained_tokens_per_s_and_core", 1.0, "7.0f"),
    "L idle %": ("learner_idle_share", 100.0, "8.0f"),
    "R idle %": ("rollout_idle_share", 100.0, "8.0f"),
    "lag": ("lag_mean", 1.0, "5.2f"),
    "masked %": ("masked_share", 100.0, "8.1f"),
    "ESS": ("ess", 1.0, "6.3f"),
    "sync ms": ("exposed_sync_s", 1e3, "7.1f"),
    "g s": ("generation_s", 1.0, "6.3f"),
    "t s": ("training_s", 1.0, "6.3f"),
    "speed-up": ("speed_up_over_disaggregated", 1.0, "8.2f"),
    "trained": ("trained_speed_up_over_disaggregated", 1.0, "7.2f"),
    "over coloc.": ("trained_speed_up_over_colocated", 1.0, "11.2f"),
    "ideal": ("ideal_over_disaggregated", 1.0, "6.2f"),
    "closed form": ("closed_form_over_disaggregated", 1.0, "11.2f"),
    "of ideal": ("share_of_ideal", 1.0, "8.2f"),
    "bound": ("bounded_share", 1.0, "5.2f"),
    "of bound": ("share_of_bounded", 1.0, "8.2f"),
}
"""Head: figure, factor, format. tok/s counts trained tokens; L and R are learner and rollouts; `speed-up` and
`ideal` are over max_lag 0 in sampled tokens, `trained` in trained ones; `closed form` takes no synchronous
step that was measured; `bound` is what a system without any cost would have of the ideal under that bound."""


def table(results: Figures) -> str:
    """Return a line per case, and below it where the time of real steps went."""
    start = 34
    heads = [f"{head:>{int(form.split('.')[0])}}" for head, (_, _, form) in COLUMNS.items()]
    lines = [f"{'engine, sigma, way (tau)':<{start}}" + " ".join(heads)]
    for case in results["cases"]:
        named = case["case"]
        stream = ", stream" if named["stream"] else ""
        name = f"{named['engine']} {named['sigma']:g} {named['way']}{stream} ({case['tail']:.1f})"
        lines.append(f"{name:<{start}}" + " ".join(_cell(case, *column) for column in COLUMNS.values()))
    for case in results["cases"]:
        if case["case"]["engine"] == "real" and "share_of_ideal" in case:
            lines.append(explain(case))
    return "\n".join(lines)


def _cell(case: Figures, name: str, factor: float, form: str) -> str:
    width = int(form.split(".")[0])
    return f"{case[name] * factor:>{form}}" if name in case else " " * width


def explain(case: Figures) -> str:
    """Say which side an asynchronous step waited for, and what that side did besides its work."""
    named = case["case"]
    is_learner = case["training_s"] > case["generation_s"]
    side = "learner" if is_learner else "rollout"
    work = {"learner/old_log_prob", "learner/update_actor", f"rollout/{BUSY}"}
    rest = {name: share for name, share in case.items() if name.startswith(f"{side}/") and name not in work}
    most = sorted(rest.items(), key=lambda item: -item[1])[:4]
    parts = ", ".join(f"{name.removeprefix(f'{side}/')} {share:.1%}" for name, share in most if share > 0.001)
    return (
        f"sigma {named['sigma']:g}, {named['way']}: the {side}s' work is {case['ideal_step_s']:.3f} s of "
        f"{case['step_s']:.3f} s; of their time besides: {parts or 'nothing'}; slots filled to "
        f"{case['slots_filled']:.0%}; tokens by lag: {_tell_lags(case)}"
    )


def _tell_lags(case: Figures) -> str:
    prefix = "lag_share/"
    shares = {name.removeprefix(prefix): share for name, share in case.items() if name.startswith(prefix)}
    return ", ".join(f"{lag}: {share:.0%}" for lag, share in shares.items()) or "-"


def check(results: Figures) -> Verdict:
    """Judge what the system costs where engine and model sleep, and what asynchrony gives with real ones."""
    if missing := [*results.get("refused", ()), *results.get("failed", ())]:
        return False, missing[0]
    ratios = {}
    for case in results["cases"]:
        named = case["case"]
        if named["engine"] == "scripted":
            name = f"{case['exposed_sync_s'] * 1e3:.1f} ms of a step for handing weights over, {_told(named)}"
            ratios[name] = MAX_EXPOSED_SHARE * case["step_s"] / max(1e-9, case["exposed_sync_s"])
        gain = case.get("trained_speed_up_over_disaggregated")
        if named["engine"] == "scripted" and named["stream"] and named["way"] == "max_lag 0" and gain:
            ratios[f"{gain:.2f} times as fast with stream, {_told(named)}"] = gain
        if named["stream"] or named["way"] in ("max_lag 0", "max_lag 1", COLOCATED):
            continue
        name = _told(named)
        if named["engine"] == "scripted":
            share, of_bounded = case["share_of_ideal"], case["share_of_bounded"]
            told = f"{share:.2f} of the ideal, {of_bounded:.2f} of what the bound leaves, {name}"
            ratios[told] = of_bounded / MIN_OF_IDEAL
        elif (named["sigma"], named["way"]) == (JUDGED_SIGMA, f"max_lag {JUDGED_WAY}"):
            speed_up = case.get("trained_speed_up_over_disaggregated")
            if speed_up is None:  # without its baseline there is nothing to judge
                continue
            ratios[f"{speed_up:.2f} times the trained tokens/s, {name}"] = speed_up / MIN_SPEED_UP
    return judge(ratios) if ratios else (False, "no judged case was measured")


def _told(case: Mapping[str, Any]) -> str:
    return f"{case['engine']}, sigma {case['sigma']:g}, {case['way']}"


def make_rows(results: Figures) -> list[Row]:
    """Return a row per case: `step_s` is the median of its steps, `step_mean_s` what speed-ups come from."""
    rows = []
    for figures in results["cases"]:
        values = {name: float(value) for name, value in figures.items() if isinstance(value, int | float)}
        samples = figures["step_samples_s"]
        values |= {"step_mean_s": figures["step_s"]}
        row = Row("pipeline", {**figures["case"], "quick": int(results["quick"])}, values)
        rates = figures["trained_samples_per_s"]
        if len(rates) > 1:
            row.spread["trained_tokens_per_s"] = spread_of(rates)
            row.counts["trained_tokens_per_s"] = len(rates)
        rows.append(row.with_samples("step_s", samples))
    return rows


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
