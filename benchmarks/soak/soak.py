"""Soak: what grows in a run that never ends, sampled from every process and file of it, and told for a week.

    asyncrl bench soak [--only scripted,vllm] [--steps N] [--minutes M] [--quick] [--check] [--json FILE]

scripted: `asyncrl up` with scripted engines and steps as small as they can be, until it has done `--steps`
(100,000). vllm: the quickstart as it ships, for `--minutes` (120). Both with Megatron-core, weight sync,
journal, checkpoints, metrics and TensorBoard.

Every process of the run is sampled, Ray's own among them: anonymous memory, descriptors, threads; of the
whole run the processes, shared-memory segments and semaphores; of each entry of its folder files and bytes.
After the first third, each is extrapolated to a week, or to a million steps if these come sooner, and judged
by its limit. What has risen and fallen three times or more is judged by its medians, peaks and troughs, of
which two must grow; the journal's payloads by the most that they may be, whenever; TensorBoard's files by the
steps that it gets.

`--quick` (scripted, under a minute) can show fast growth only, so it judges the lower end of the interval;
the full form judges the slope itself.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.options import Verdict, end_on_sigterm, judge, make_parser, report
from benchmarks.harness.rows import Row
from benchmarks.soak.live import make_config, soak
from benchmarks.soak.sampling import Sample
from benchmarks.soak.trend import CAPS, MIB, Trend, find_trends

PARTS = ("scripted", "vllm")
STEPS, MINUTES, QUICK_S = 100_000, 120.0, 24.0
EVERY_S, QUICK_EVERY_S = 2.0, 0.5
TOLD_RATIO = 10.0
"""A growth is told if it is more than a tenth of its limit."""
MAX_KEPT = 60
"""Samples of a part that `--json` keeps, evenly drawn."""

Figures = dict[str, Any]


def main(arguments: Sequence[str]) -> int:
    """Measure as the command line says and return the exit code."""
    given = read_arguments(arguments)
    end_on_sigterm()  # the live run must not outlive this
    results = measure(given, lambda sentence: print(sentence, file=sys.stderr, flush=True))
    return report(given, results, table, check, make_rows(results))


def read_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = make_parser("asyncrl bench soak", __doc__, f"scripted alone, for {QUICK_S:g} s")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--only", choices=PARTS, help="one part")
    parser.add_argument("--steps", type=int, default=STEPS, help="of the scripted part")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="of the part with vLLM")
    return parser.parse_args(arguments)


def measure(given: argparse.Namespace, say: Callable[[str], None]) -> Figures:
    """Return the samples and trends of each part that was asked for.

    Raises:
        ServiceFailed: A run did not start, ended, or makes no steps.
    """

    def is_enough(part: str) -> Callable[[Sample], bool]:
        if given.quick:
            return lambda sample: sample.at_s >= QUICK_S
        if part == "scripted":
            return lambda sample: sample.step >= given.steps
        return lambda sample: sample.at_s >= 60 * given.minutes

    found: Figures = {"benchmark": "soak", "quick": given.quick, "parts": {}}
    for part in (given.only,) if given.only else PARTS[:1] if given.quick else PARTS:
        with tempfile.TemporaryDirectory(prefix="asyncrl-bench-") as folder:
            config = make_config(part, Path(folder), say)
            samples = soak(config, is_enough(part), QUICK_EVERY_S if given.quick else EVERY_S, say)
        found["parts"][part] = {
            "seconds": samples[-1].at_s,
            "steps": samples[-1].step - samples[0].step,
            "trends": [vars(trend) for trend in find_trends(samples)],
            "samples": [vars(sample) for sample in samples[:: 1 + len(samples) // MAX_KEPT]],
        }
    return found


def _trends(part: Figures) -> list[Trend]:
    return [Trend(**figures) for figures in part["trends"]]


def table(results: Figures) -> str:
    """Return each part with what grows, and how many of its series do not."""
    lines = []
    for name, part in results["parts"].items():
        trends = _trends(part)
        grown = [one for one in trends if one.ratio(is_shown=False) < TOLD_RATIO]
        lines.append(
            f"{name}: {part['steps']} steps in {part['seconds']:.0f} s; {len(trends)} series, "
            f"{len(trends) - len(grown)} of them below a tenth of their limit"
        )
        lines += [f"  {_tell(one)}" for one in sorted(grown, key=lambda one: one.ratio(is_shown=False))]
    return "\n".join(lines)


def _tell(trend: Trend) -> str:
    is_bytes = "bytes" in trend.label.partition("/")[0]
    unit, name = (MIB, " MiB") if is_bytes else (1, "")
    if trend.label in CAPS:
        cap = CAPS[trend.label] / unit
        return f"{trend.label}: at most {trend.highest / unit:.1f}{name}; cap {cap:.0f}{name}"
    return (
        f"{trend.label}: {trend.first / unit:.1f} -> {trend.last / unit:.1f}{name}, "
        f"{trend.per_step:.3g} a step; in a week {trend.week / unit:.0f}{name} "
        f"({trend.low / unit:.0f} to {trend.high / unit:.0f}), limit {trend.limit / unit:.0f}{name}"
    )


def check(results: Figures) -> Verdict:
    """Judge the growth of every series by its limit."""
    is_shown = results["quick"]
    ratios = {
        f"{name}, {trend.label}": min(trend.ratio(is_shown=is_shown), 100.0)
        for name, part in results["parts"].items()
        for trend in _trends(part)
    }
    return judge(ratios)


def make_rows(results: Figures) -> list[Row]:
    """Return a row per series."""
    return [
        Row.of(
            "soak",
            {"part": name, "series": trend.label, "quick": int(results["quick"])},
            {
                "first": trend.first,
                "last": trend.last,
                "highest": trend.highest,
                "per_step": trend.per_step,
                "per_week": trend.week,
            },
        )
        for name, part in results["parts"].items()
        for trend in _trends(part)
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
