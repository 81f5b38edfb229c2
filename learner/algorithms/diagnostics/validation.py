"""Scores of several answers per prompt: mean, best, worst and majority of n, by bootstrap (pure).

The draws are those of a generator with a fixed seed, so the same scores give the same numbers.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

NUM_DRAWS = 1000
SEED = 42
Scores = Sequence[float]


def validation_metrics(
    sources: Sequence[str],
    prompts: Sequence[str],
    variables: dict[str, Scores],
    answers: Sequence[str] | None = None,
) -> dict[str, dict[str, dict[str, float]]]:
    """Return source -> variable -> metric, averaged over the source's prompts.

    With N answers per prompt: mean@N; for N > 1 also std@N, and for n = 2, 4, ... and N best@n and
    worst@n, and with `answers` maj@n, each with /mean and /std over draws.
    """
    rows_of: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for row, (source, prompt) in enumerate(zip(sources, prompts, strict=True)):
        rows_of[source][prompt].append(row)
    return {
        source: {
            name: _average(
                [
                    prompt_metrics(
                        [scores[row] for row in rows],
                        None if answers is None else [answers[row] for row in rows],
                    )
                    for rows in by_prompt.values()
                ]
            )
            for name, scores in variables.items()
        }
        for source, by_prompt in rows_of.items()
    }


def prompt_metrics(scores: Scores, answers: Sequence[str] | None = None) -> dict[str, float]:
    """Return the metrics of one prompt's answers."""
    count = len(scores)
    metrics = {f"mean@{count}": float(np.mean(scores))}
    if count == 1:
        return metrics
    metrics[f"std@{count}"] = float(np.std(scores))
    rows = list(range(count))
    for size in _sizes(count):
        best, worst = _draw(
            rows,
            size,
            [
                lambda drawn: max(scores[row] for row in drawn),
                lambda drawn: min(scores[row] for row in drawn),
            ],
        )
        metrics |= _named(f"best@{size}", best) | _named(f"worst@{size}", worst)
        if answers is not None:
            (majority,) = _draw(rows, size, [lambda drawn: _score_of_majority(drawn, scores, answers)])
            metrics |= _named(f"maj@{size}", majority)
    return metrics


def _sizes(count: int) -> list[int]:
    sizes, size = [], 2
    while size < count:
        sizes.append(size)
        size *= 2
    return [*sizes, count]


def _draw(
    rows: Sequence[int], size: int, measures: Sequence[Callable[[Sequence[int]], float]]
) -> list[list[float]]:
    generator = np.random.RandomState(SEED)
    draws: list[npt.NDArray[np.int_]] = [
        generator.choice(len(rows), size=size, replace=True) for _ in range(NUM_DRAWS)
    ]
    return [[measure([rows[i] for i in drawn]) for drawn in draws] for measure in measures]


def _score_of_majority(drawn: Sequence[int], scores: Scores, answers: Sequence[str]) -> float:
    """Return the score of the first drawn row that has the most frequent answer."""
    winner = Counter(answers[row] for row in drawn).most_common(1)[0][0]
    return next(scores[row] for row in drawn if answers[row] == winner)


def _named(name: str, values: Sequence[float]) -> dict[str, float]:
    return {f"{name}/mean": float(np.mean(values)), f"{name}/std": float(np.std(values))}


def _average(found: Sequence[dict[str, float]]) -> dict[str, float]:
    together: dict[str, list[float]] = defaultdict(list)
    for metrics in found:
        for name, value in metrics.items():
            together[name].append(value)
    return {name: float(np.mean(values)) for name, values in together.items()}
