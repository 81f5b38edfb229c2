"""Statistics of answers to held-out prompts, as tallies that add up over parts (pure).

Per prompt with k answers: the share of right answers (mean@k); the chance that one of n drawn without
replacement is right, for n = 2, 4, ... and k (pass@n, the unbiased estimator of Chen et al., arXiv
2107.03374); and the correctness of the most frequent answer (maj@k, Wang et al., arXiv 2203.11171). Names are
verl's: `val-core/<source>/<variable>/<metric>`; the source `held_out` is all of them together. Rewards
and lengths are means over prompts, of the answers that did not fail.

Invariant: no two sources have one name, and none has the name of all together.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from asyncrl.core.metrics.tallies import Tally, tally_shares, tally_values

ALL = "held_out"
MAX_SOURCES = 32
MAX_SOURCE_CHARACTERS = 100


@dataclass(frozen=True)
class Judged:
    """One answer: whether it is right, its reward, what it says in short, and its length.

    Attributes:
        answer: Equal ones are of one opinion; None for an answer that states nothing.
    """

    is_right: bool
    reward: float
    answer: str | None
    num_tokens: int
    is_cut: bool


@dataclass(frozen=True)
class JudgedPrompt:
    """All answers to one prompt; None for one that failed, which counts as wrong and as no opinion."""

    source: str
    answers: tuple[Judged | None, ...]

    @property
    def done(self) -> list[Judged]:
        return [answer for answer in self.answers if answer is not None]

    @property
    def num_right(self) -> int:
        return sum(answer.is_right for answer in self.done)


def estimate_pass_at(num_answers: int, num_right: int, k: int) -> float:
    """Return the chance that k of the answers, drawn without replacement, hold a right one.

    >>> estimate_pass_at(4, 1, 2)
    0.5
    """
    assert 1 <= k <= num_answers, "no more can be drawn than there are"
    return 1.0 - math.comb(num_answers - num_right, k) / math.comb(num_answers, k)


def score_majority(answers: Iterable[Judged]) -> float:
    """Return whether the most frequent answer is right, as a share of those that tie for it; 0 for none.

    Equal answers may be judged differently, by a reward that also looks at the form: then their share counts.
    """
    opinions: dict[str, list[bool]] = defaultdict(list)
    for answer in answers:
        if answer.answer is not None:
            opinions[answer.answer].append(answer.is_right)
    if not opinions:
        return 0.0
    most = max(len(found) for found in opinions.values())
    winners = [found for found in opinions.values() if len(found) == most]
    return sum(sum(found) / most for found in winners) / len(winners)


def name_sources(sources: Iterable[str]) -> dict[str, str]:
    """Return the first named sources, in the order of their names, and what metrics call them.

    A name that is taken, after it was cut or by all of them together, gets a number.

    >>> name_sources(["held_out", "math"])
    {'held_out': 'held_out~2', 'math': 'math'}
    """
    names: dict[str, str] = {}
    taken = {ALL}
    for source in sorted({source for source in sources if source})[:MAX_SOURCES]:
        names[source] = _first_free(source, taken)
        taken.add(names[source])
    return names


def _first_free(source: str, taken: Collection[str]) -> str:
    endings = ("", *(f"~{number}" for number in range(2, MAX_SOURCES + 3)))
    cut = (source[: MAX_SOURCE_CHARACTERS - len(ending)] + ending for ending in endings)
    return next(name for name in cut if name not in taken)


def tally_prompts(
    prompts: Sequence[JudgedPrompt], num_samples: int, names: dict[str, str]
) -> dict[str, Tally]:
    """Return the tallies of some prompts with `num_samples` answers each, by metric.

    Args:
        names: Name of each source in metrics; others count in `held_out` alone.
    """
    whole = _tally_source(ALL, prompts, num_samples)
    tallies = dict(whole)
    for source, name in names.items():
        found = [prompt for prompt in prompts if prompt.source == source]
        if found:
            fresh = _tally_source(name, found, num_samples)
            assert not fresh.keys() & tallies.keys(), "`name_sources` gives each source a name of its own"
            tallies |= fresh
    num_done = sum(len(prompt.done) for prompt in prompts)
    if num_done:
        tallies["reward_mean"] = whole[f"val-core/{ALL}/reward/mean@{num_samples}"]
    return {
        **tallies,
        "accuracy": whole[f"val-core/{ALL}/acc/mean@{num_samples}"],
        "val-aux/num_prompts": Tally(0, float(len(prompts))),
        "val-aux/num_failed": Tally(0, float(len(prompts) * num_samples - num_done)),
    }


def _tally_source(name: str, prompts: Sequence[JudgedPrompt], num_samples: int) -> dict[str, Tally]:
    k = num_samples
    core, aux = f"val-core/{name}", f"val-aux/{name}"
    answered = [prompt.done for prompt in prompts if prompt.done]
    tallies = {
        f"{core}/acc/mean@{k}": tally_shares([prompt.num_right / k for prompt in prompts], k),
        f"{aux}/clip_ratio": tally_shares(
            [sum(answer.is_cut for answer in prompt.done) / k for prompt in prompts], k
        ),
    }
    if answered:
        rewards = [sum(answer.reward for answer in done) / len(done) for done in answered]
        lengths = [sum(answer.num_tokens for answer in done) / len(done) for done in answered]
        tallies[f"{core}/reward/mean@{k}"] = tally_values(rewards)
        tallies[f"{aux}/response_length/mean"] = tally_values(lengths)
    if k == 1:
        return tallies
    for n in _sizes(k):
        chances = [estimate_pass_at(k, prompt.num_right, n) for prompt in prompts]
        tallies[f"{core if n == k else aux}/acc/pass@{n}"] = tally_shares(chances, k)
    majorities = [score_majority(prompt.done) for prompt in prompts]
    tallies[f"{core}/acc/maj@{k}"] = tally_shares(majorities, k)
    return tallies


def _sizes(k: int) -> list[int]:
    """Return 2, 4, ... below `k`, and `k`."""
    return [*(2**power for power in range(1, (k - 1).bit_length())), k]
