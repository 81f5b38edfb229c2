"""`asyncrl bench compare A B`: ratios of two measurements, and whether they are more than noise.

Reads files of rows, `metrics.jsonl` of a run, and the lines that verl's console logger prints
(`step:N - name:value - …`), so that a run can be held against one of verl. Owns the rule for noise: a ratio
differs from 1 only if it does by more than both spreads together, as shares of their medians, added in
squares. A figure that was measured once has no spread, and the line says that.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from asyncrl.errors import DataError
from benchmarks.rows import Row, RowFile

RUN = "run"
"""The benchmark that the lines of a log are: one row, its samples the steps."""
WARM_UP_STEPS = 1
"""Of a log: left out where more than two steps follow."""
_STEP = re.compile(r"(?<!\w)step:(\d+)((?: - [^\s:]+:\S+)+)")
_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|[-+]?inf|nan"
_PAIR = re.compile(rf" - ([^\s:]+):(?:np\.\w+\()?({_NUMBER})\)?(?= - |\s|$)")
_HEADS = ("processor", "cores", "gpu", "gpus")


@dataclass(frozen=True)
class Measured:
    """What one side of a comparison is."""

    name: str
    rows: tuple[Row, ...]
    hardware: Mapping[str, str | int]
    versions: Mapping[str, str]


@dataclass(frozen=True)
class Ratio:
    """One value of both sides.

    Attributes:
        noise: Of the ratio, as a share; None if a side was measured once.
    """

    row: Row
    value: str
    one: float
    other: float
    noise: float | None

    @property
    def ratio(self) -> float:
        """B over A; 1 where both are 0."""
        return 1.0 if self.one == self.other else self.other / self.one if self.one else math.inf

    @property
    def verdict(self) -> str:
        if self.one == self.other:
            return "equal"
        if self.noise is None:
            return "measured once: noise unknown"
        return "noise is larger" if abs(self.ratio - 1) <= self.noise else "differs"


def main(arguments: Sequence[str]) -> int:
    """Compare as the command line says; return 1 if no row is in both."""
    parser = argparse.ArgumentParser(prog="asyncrl bench compare", description=__doc__)
    parser.add_argument("one", type=Path, metavar="A", help="a file of rows, metrics.jsonl, or verl's log")
    parser.add_argument("other", type=Path, metavar="B")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the ratios there, as a PNG")
    parser.add_argument("--json", action="store_true", help="print JSON")
    given = parser.parse_args(arguments)
    one, other = read(given.one), read(given.other)
    ratios = compare(one.rows, other.rows)
    for sentence in differences(one, other):
        print(sentence, file=sys.stderr)
    print(_as_json(ratios) if given.json else table(ratios))
    if given.plot is not None and ratios:
        from benchmarks.plots import draw_ratios

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
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    if '"format"' in text[:100]:
        file = RowFile.read(path)
        return Measured(str(path), file.rows, file.hardware, file.versions)
    steps = list(_steps_of_log(text)) or list(_steps_of_run(text))
    if not steps:
        raise DataError(
            f"{path} is no file of rows, no metrics.jsonl and has no line of the form 'step:N - name:value'",
            hint="Give what `asyncrl bench --json` wrote, a run's metrics.jsonl, or verl's console log",
        )
    kept = steps[WARM_UP_STEPS:] if len(steps) > 2 + WARM_UP_STEPS else steps
    names = dict.fromkeys(name for step in kept for name in step)
    samples = {
        name: [step[name] for step in kept if name in step and math.isfinite(step[name])] for name in names
    }
    row = Row.of(RUN, {}, {name: found for name, found in samples.items() if found})
    return Measured(str(path), (row,), {}, {})


def compare(ones: Sequence[Row], others: Sequence[Row]) -> list[Ratio]:
    """Return the ratios of all values that a case has on both sides."""
    known = {_key(row): row for row in others}
    return [
        Ratio(
            row,
            value,
            row.values[value],
            known[_key(row)].values[value],
            _noise(row, known[_key(row)], value),
        )
        for row in ones
        if _key(row) in known
        for value in row.values
        if value in known[_key(row)].values
    ]


def differences(one: Measured, other: Measured) -> Iterator[str]:
    """Yield a sentence for each thing besides the code that may have made the figures differ."""
    for what, left, right in (
        ("hardware", one.hardware, other.hardware),
        ("versions", one.versions, other.versions),
    ):
        names = _HEADS if what == "hardware" else sorted({*left, *right})
        found = [
            f"{name} {left.get(name)} and {right.get(name)}" for name in names if _differs(name, left, right)
        ]
        if left and right and found:
            yield f"{what} differ: {'; '.join(found)}"


def _differs(name: str, left: Mapping[str, object], right: Mapping[str, object]) -> bool:
    return left.get(name) != right.get(name)


def table(ratios: Sequence[Ratio]) -> str:
    """Return a line per ratio."""
    lines = ["| benchmark | case | value | A | B | B / A | noise | |", "|---|---|---|---|---|---|---|---|"]
    for found in ratios:
        case = ", ".join(f"{name} {value}" for name, value in found.row.case.items())
        noise = "" if found.noise is None else f"{found.noise:.1%}"
        lines.append(
            f"| {found.row.bench} | {case} | {found.value} | {found.one:.4g} | {found.other:.4g} "
            f"| {found.ratio:.3f} | {noise} | {found.verdict} |"
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


def _noise(one: Row, other: Row, value: str) -> float | None:
    """Return both relative spreads together; None if a side has none."""
    shares = []
    for row in (one, other):
        if value not in row.spread:
            return None
        shares.append(row.spread[value] / abs(row.values[value]) if row.values[value] else 0.0)
    return math.hypot(*shares)


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
        if isinstance(row, dict) and "timing_s/step" in row:
            yield {name: float(value) for name, value in row.items() if isinstance(value, int | float)}
