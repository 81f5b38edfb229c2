"""Pictures of rows: a panel per benchmark and value, and ratios with their noise.

Owns what stands on which axis: the number of a case that takes most values lies on the x axis, the rest of
the case is a line or bar each; the spread is drawn with every point.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.harness.rows import Row, unwritable
from benchmarks.reports.ratios import Ratio

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_PANELS, MAX_LINES, MAX_RATIOS = 12, 8, 60
MAX_SHOWN = 10.0
"""Of a ratio: what is larger stands there."""
DPI = 110


def draw(rows: Sequence[Row], path: Path) -> list[str]:
    """Draw the values that most rows of a benchmark have, in at most `MAX_PANELS` panels, as a PNG.

    Return a sentence for each thing that there was no room for.

    Raises:
        DataError: The file cannot be written.
    """
    from matplotlib.figure import Figure

    wanted = order_panels(rows)
    panels = wanted[:MAX_PANELS]
    columns = min(3, max(1, len(panels)))
    lines = -(-len(panels) // columns) or 1
    figure = Figure(figsize=(4.6 * columns, 3.2 * lines), layout="constrained")
    grid = figure.subplots(lines, columns, squeeze=False)
    for axes in grid.flat[len(panels) :]:
        axes.axis("off")
    missing = [f"{len(panels)} of {len(wanted)} panels are drawn"] if len(wanted) > len(panels) else []
    for axes, (bench, value) in zip(grid.flat, panels, strict=False):
        num_lines = _draw_panel(
            axes, [row for row in rows if row.bench == bench and value in row.values], value
        )
        if num_lines > MAX_LINES:
            missing.append(f"{bench}: {value}: {MAX_LINES} of {num_lines} lines are drawn")
        axes.set_title(f"{bench}: {value}", fontsize="small")
    save(figure, path)
    return missing


def save(figure: Figure, path: Path, form: str | None = "png") -> None:
    """Write a figure as a PNG, or as its name says if `form` is None.

    Raises:
        DataError: The file cannot be written.
    """
    try:
        figure.savefig(path, dpi=DPI, format=form)
    except OSError as error:
        raise unwritable(path, error) from error


def draw_ratios(ratios: Sequence[Ratio], path: Path) -> None:
    """Draw B over A of each value, with its noise; those beyond the noise are marked.

    Raises:
        DataError: The file cannot be written.
    """
    from matplotlib.figure import Figure

    drawn = [found for found in ratios if found.ratio is not None]
    shown = drawn[:MAX_RATIOS]
    figure = Figure(figsize=(8, 1.2 + 0.22 * len(shown)), layout="constrained")
    axes = figure.subplots()
    for place, found in enumerate(shown):
        colour = "tab:red" if found.verdict == "differs" else "tab:grey"
        low, point, high = bar_of(found)
        error = [[point - low], [high - point]]
        axes.errorbar(point, place, xerr=error, fmt="o", color=colour, markersize=4)
    labels = [f"{found.row.bench} {_words(found.row.case)} {found.value}" for found in shown]
    axes.set_yticks(range(len(shown)), labels, fontsize=6)
    axes.invert_yaxis()
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_xlabel(f"B / A, and noise; {len(shown)} of {len(ratios)} values")
    save(figure, path)


def bar_of(found: Ratio) -> tuple[float, float, float]:
    """Return the low end of a ratio's bar, the ratio and the high end, within `MAX_SHOWN` of 0.

    The bar is without 1 exactly if the verdict is that the two sides differ. A noise that is not known has no
    length.
    """
    assert found.ratio is not None, "nothing is so many times 0"
    noise = found.noise_share or 0.0
    low, point, high = (
        max(-MAX_SHOWN, min(MAX_SHOWN, end))
        for end in (found.ratio - noise, found.ratio, found.ratio + noise)
    )
    return low, point, high


def order_panels(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """Return every (benchmark, value): of each benchmark in turn what most of its rows have.

    The first `MAX_PANELS` are drawn.
    """
    by_bench: dict[str, dict[str, int]] = {}
    for row in rows:
        counts = by_bench.setdefault(row.bench, {})
        for value in row.values:
            counts[value] = counts.get(value, 0) + 1
    queues = [
        [(bench, value) for value, _ in sorted(counts.items(), key=lambda item: -item[1])]
        for bench, counts in by_bench.items()
    ]
    turns = max((len(queue) for queue in queues), default=0)
    return [queue[turn] for turn in range(turns) for queue in queues if turn < len(queue)]


def choose_axis(rows: Sequence[Row]) -> str | None:
    """Return the number of the cases that takes most values; None if none takes two."""
    found: dict[str, set[float]] = {}
    for row in rows:
        for name, value in row.case.items():
            if isinstance(value, int | float):
                found.setdefault(name, set()).add(value)
    most = max(found, key=lambda name: len(found[name]), default="")
    return most if most and len(found[most]) > 1 else None


def _draw_panel(axes: Any, rows: Sequence[Row], value: str) -> int:
    """Draw a bar per row, or the first `MAX_LINES` lines over a number; return how many lines there are."""
    axis, same = choose_axis(rows), _common(rows)
    if axis is None:
        labels = [_words(_without(row.case, same)) or row.bench for row in rows]
        errors = [row.spread.get(value, 0.0) for row in rows]
        axes.barh(range(len(rows)), [row.values[value] for row in rows], xerr=errors)
        axes.set_yticks(range(len(rows)), labels, fontsize=6)
        return 0
    lines: dict[str, list[Row]] = {}
    for row in rows:
        lines.setdefault(_words(_without(row.case, {*same, axis})), []).append(row)
    for label, found in list(lines.items())[:MAX_LINES]:
        points = sorted((row for row in found if axis in row.case), key=lambda row: float(row.case[axis]))
        places = [float(row.case[axis]) for row in points]
        errors = [row.spread.get(value, 0.0) for row in points]
        axes.errorbar(places, [row.values[value] for row in points], yerr=errors, marker="o", label=label)
    axes.set_xlabel(axis, fontsize="small")
    if any(lines):
        axes.legend(loc="best", fontsize=6)
    return len(lines)


def _common(rows: Sequence[Row]) -> set[str]:
    """Return the names that say the same of every row, and so tell no two apart."""
    names = {name for row in rows for name in row.case}
    return {name for name in names if len({row.case.get(name) for row in rows}) == 1}


def _without(case: Mapping[str, str | int | float], names: set[str]) -> dict[str, str | int | float]:
    return {name: value for name, value in case.items() if name not in names}


def _words(case: Mapping[str, str | int | float]) -> str:
    return ", ".join(f"{name} {value}" for name, value in case.items())
