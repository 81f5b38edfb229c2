"""`asyncrl bench compare A B`: ratios of two measurements, and whether they are more than noise.

Reads files of rows, `metrics.jsonl` of a run, and the lines that verl's console logger prints
(`step:N - name:value - …`), so that a run can be held against one of verl. Owns the rule for noise: two
medians differ only if they do by more than the noise of both (`ratios.noise_of_median`, at 95 %), added in
quadrature; of many values without a difference about one in twenty is still reported to differ. With fewer
than four samples, or an unknown count, noise is not estimated and the row says so. The rule assumes
independent samples: autocorrelated steps vary more than estimated, and steps of one run do not show
run-to-run variance, which a message says. Defines which log entries are excluded: warm-up steps, timestamps
and cumulative counters.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from asyncrl.control.rows.row_files import lines_of, older_files
from asyncrl.core.errors import DataError
from benchmarks.harness.options import writable
from benchmarks.harness.rows import Row, RowFile
from benchmarks.reports.plots import draw_ratios
from benchmarks.reports.ratios import MIN_SAMPLES, Ratio, noise_of_median

RUN = "run"
"""Benchmark name of a log: it becomes one row, with its steps as samples."""
OF_STEPS = (RUN, "pipeline", "scale", "gpu.end_to_end")
"""Benchmarks whose samples are steps of one run."""
WITHIN_ONE_RUN = "noise within one run each: repeat both to know that between runs"
WARM_UP_STEPS = 1
"""Of the steps of a log that trained: left out where `MIN_STEPS` others are."""
MIN_STEPS = 3
STEP_TIME, FIRST_AFTER_START = "timing_s/step", "training/is_first_after_start"
OF_ROWS, OF_RUN, OF_VERL = "a file of rows", "metrics.jsonl of a run", "a log of verl"
NOT_FIGURES = re.compile(
    r"time|training/(global_step|epoch|is_first_after_start)|checkpoint/skipped|record/lost_steps|gateway/.+"
    r"|guard/(?!lr_scale$|is_kl_off$).+|(buffer/(dropped|placed)|metrics/sink_dropped)/.+"
    r"|rollout/(reward_errors|rewards)/.+|perf/rollout_(preemptions|limit/.+)"
    r"|weights/(version|published|bytes_(sent|copied|mapped)|maps_failed|rounds|rounds_failed|failed/.+"
    r"|culprits|deferred|skipped"
    r"|missed_swaps|failed_loads)"
)
"""Log entries that are excluded: timestamps, and counters that grow as long as the run does."""
NOT_ALIKE = {
    "perf/throughput": "a run's is per learner rank, verl's per GPU of the whole job",
}
"""Metrics that asyncrl and verl name alike but define differently; docs/from-verl.md lists them."""
_STEP = re.compile(r"(?<!\w)step:(\d+)((?: - [^\s:]+:\S+)+)")
_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|[-+]?inf|nan"
_PAIR = re.compile(rf" - ([^\s:]+):(?:np\.\w+\()?({_NUMBER})\)?(?= - |\s|$)")
_HEADS = ("processor", "cores", "gpu", "gpus")


@dataclass(frozen=True)
class Measured:
    """One side of a comparison.

    Attributes:
        form: `OF_ROWS`, `OF_RUN` or `OF_VERL`; of the latter two no hardware, versions and command.
    """

    name: str
    form: str
    rows: tuple[Row, ...]
    hardware: Mapping[str, str | int]
    versions: Mapping[str, str]
    command: str = ""


def main(arguments: Sequence[str]) -> int:
    """Compare as the command line says; return 1 if no row is in both."""
    parser = argparse.ArgumentParser(prog="asyncrl bench compare", description=__doc__)
    parser.add_argument("one", type=Path, metavar="A", help="a file of rows, metrics.jsonl, or verl's log")
    parser.add_argument("other", type=Path, metavar="B")
    parser.add_argument("--plot", type=writable, metavar="FILE", help="draw the ratios there, as a PNG")
    parser.add_argument("--json", action="store_true", help="print JSON")
    given = parser.parse_args(arguments)
    one, other = read(given.one), read(given.other)
    ratios = compare(one.rows, other.rows, not_alike(one, other))
    for sentence in differences(one, other):
        print(sentence, file=sys.stderr)
    if any(found.noise is not None and found.row.bench in OF_STEPS for found in ratios):
        print(WITHIN_ONE_RUN, file=sys.stderr)
    print(_as_json(ratios) if given.json else table(ratios))
    if given.plot is not None and ratios:
        draw_ratios(ratios, given.plot)
    if not ratios:
        print("no case is in both files", file=sys.stderr)
    return int(not ratios)


def read(path: Path) -> Measured:
    """Return what a file holds, whichever form it has.

    Raises:
        DataError: It cannot be read, or is of none of the forms.
    """
    try:
        files = (*older_files(path), path)
        text = b"".join(line for one in files for line in lines_of(one)).decode(errors="replace")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    if '"format"' in text[:100]:
        file = RowFile.read(path)
        return Measured(str(path), OF_ROWS, file.rows, file.hardware, file.versions, file.command)
    steps, form = list(_steps_of_log(text)), OF_VERL
    if not steps:
        steps, form = list(_steps_of_run(text)), OF_RUN
    if not steps:
        raise DataError(
            f"{path} is no file of rows, no metrics.jsonl and has no line of the form 'step:N - name:value'",
            hint="Give what `asyncrl bench --json` wrote, a run's metrics.jsonl, or verl's console log",
        )
    kept = _without_warm_up(steps)
    names = dict.fromkeys(name for step in kept for name in step if not NOT_FIGURES.fullmatch(name))
    samples = {
        name: [step[name] for step in kept if name in step and math.isfinite(step[name])] for name in names
    }
    row = Row.of(RUN, {}, {name: found for name, found in samples.items() if found})
    return Measured(str(path), form, (row,), {}, {})


def compare(ones: Sequence[Row], others: Sequence[Row], left_out: Collection[str] = ()) -> list[Ratio]:
    """Return the ratios of all values that a case has on both sides, but for those `left_out` by name."""
    known = {_key(row): row for row in others}
    return [
        _ratio(row, known[_key(row)], value)
        for row in ones
        if _key(row) in known
        for value in row.values
        if value in known[_key(row)].values and value not in left_out
    ]


def not_alike(one: Measured, other: Measured) -> dict[str, str]:
    """Return the metrics that both sides name alike but define differently, with the difference."""
    return NOT_ALIKE if {one.form, other.form} == {OF_RUN, OF_VERL} else {}


def differences(one: Measured, other: Measured) -> Iterator[str]:
    """Yield a sentence for each thing besides the code that may have made the figures differ."""
    yield from (
        _unknown(side, name) for side, name in ((one, "A"), (other, "B")) if not _is_machine_known(side)
    )
    if _is_machine_known(one) and _is_machine_known(other):
        yield from _differing("hardware", _HEADS, one.hardware, other.hardware)
    if one.versions and other.versions:
        yield from _differing(
            "versions", sorted({*one.versions, *other.versions}), one.versions, other.versions
        )
    if one.command and other.command and one.command != other.command:
        yield f"commands differ: '{one.command}' and '{other.command}'"
    yield from _differing_work(one.rows, other.rows)
    for name, reason in not_alike(one, other).items():
        if all(any(name in row.values for row in side.rows) for side in (one, other)):
            yield f"{name} is left out: {reason}"


def _is_machine_known(side: Measured) -> bool:
    return any(name in side.hardware for name in _HEADS)


def _unknown(side: Measured, name: str) -> str:
    if side.form == OF_ROWS:
        return f"nothing is known of {name}'s machine"
    return f"nothing is known of {name}'s machine, versions and command: it is {side.form}"


def _differing(
    what: str, names: Iterable[str], left: Mapping[str, object], right: Mapping[str, object]
) -> Iterator[str]:
    found = [
        f"{name} {left.get(name)} and {right.get(name)}"
        for name in names
        if left.get(name) != right.get(name)
    ]
    if found:
        yield f"{what} differ: {'; '.join(found)}"


def _differing_work(ones: Sequence[Row], others: Sequence[Row]) -> Iterator[str]:
    """Yield the seeds that differ, and the number of cases that only one side has."""
    one, other = {_key(row): row for row in ones}, {_key(row): row for row in others}
    both = [key for key in one if key in other]
    seeds = [(one[key].seed, other[key].seed) for key in both if one[key].seed != other[key].seed]
    if seeds:
        pairs = "; ".join(f"{left} and {right}" for left, right in dict.fromkeys(seeds))
        yield f"seeds differ in {len(seeds)} of {len(both)} cases: {pairs}"
    if both and (len(one) > len(both) or len(other) > len(both)):
        yield f"cases of one side only: {len(one) - len(both)} of A, {len(other) - len(both)} of B"


def table(ratios: Sequence[Ratio]) -> str:
    """Return a line per ratio; the noise in the value's unit, and as a share of A."""
    lines = ["| benchmark | case | value | A | B | B / A | noise | |", "|---|---|---|---|---|---|---|---|"]
    for found in ratios:
        case = ", ".join(f"{name} {value}" for name, value in found.row.case.items())
        ratio = "" if found.ratio is None else f"{found.ratio:.3f}"
        share = "" if found.noise_share is None else f" ({found.noise_share:.1%})"
        noise = "" if found.noise is None else f"{found.noise:.2g}{share}"
        lines.append(
            f"| {found.row.bench} | {case} | {found.value} | {found.one:.4g} | {found.other:.4g} "
            f"| {ratio} | {noise} | {found.verdict} |"
        )
    return "\n".join(lines)


def _as_json(ratios: Sequence[Ratio]) -> str:
    fields = [
        {
            "bench": found.row.bench,
            "case": found.row.case,
            "value": found.value,
            "one": found.one,
            "other": found.other,
            "ratio": found.ratio,
            "noise": found.noise,
            "verdict": found.verdict,
        }
        for found in ratios
    ]
    return json.dumps(fields)


def _key(row: Row) -> str:
    return json.dumps([row.bench, dict(sorted(row.case.items()))])


def _ratio(one: Row, other: Row, value: str) -> Ratio:
    """Return the ratio with the combined noise of both medians, or the reason why it is unknown."""
    figures = (one.values[value], other.values[value])
    if any(value not in row.spread for row in (one, other)):
        return Ratio(one, value, *figures, None, "measured once: noise unknown")
    if any(value not in row.counts for row in (one, other)):
        return Ratio(one, value, *figures, None, "too few samples known: spread of unknown count")
    if any(row.counts[value] < MIN_SAMPLES for row in (one, other)):
        return Ratio(one, value, *figures, None, "too few samples")
    noises = (noise_of_median(row.spread[value], row.counts[value]) for row in (one, other))
    return Ratio(one, value, *figures, math.hypot(*noises))


def _without_warm_up(steps: Sequence[Mapping[str, float]]) -> list[Mapping[str, float]]:
    """Return the steps but the first that trained, and the first after each resume, if enough are left.

    verl's evaluation before training is a line with the number of a step: it has no time of one, and stays.
    """
    trained = [place for place, step in enumerate(steps) if STEP_TIME in step] or list(range(len(steps)))
    started = [place for place in trained if steps[place].get(FIRST_AFTER_START)]
    dropped = {*trained[:WARM_UP_STEPS], *started}
    if len(trained) - len(dropped) < MIN_STEPS:
        return list(steps)
    return [step for place, step in enumerate(steps) if place not in dropped]


def _steps_of_log(text: str) -> Iterator[dict[str, float]]:
    """Yield the metrics of each step that verl's console logger printed, whatever stands before them."""
    for found in _STEP.finditer(text):
        yield {name: float(value) for name, value in _PAIR.findall(found.group(2))}


def _steps_of_run(text: str) -> Iterator[dict[str, float]]:
    for line in text.splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and STEP_TIME in row:
            yield {name: float(value) for name, value in row.items() if isinstance(value, int | float)}
