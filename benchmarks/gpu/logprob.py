"""Log-probs of a large vocabulary on one GPU: fused and in tiles, against full logits, in time and memory.

Run: `python -m benchmarks.gpu.logprob --check`. Forward and backward of one training loss over hidden states
in bfloat16, with Qwen's vocabulary; the plain way keeps float32 logits. `--quick` checks the logic on any
machine with a tiny vocabulary; its figures say nothing. Not run on a GPU.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Sequence
from functools import partial

import torch

from benchmarks.gpu.frame import find_device, make_part_parser, measure_peak, run_part, time_call
from benchmarks.harness.options import Verdict, judge
from benchmarks.harness.rows import Row
from learner.numerics.fused_logprob import fused_logprobs

TEMPERATURE = 0.8
TARGET_SPEED, TARGET_MEMORY = 1.0, 0.1
"""Of the plain way's time at least as fast, with at most a tenth of its memory."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of the measurement, and the number of turns."""

    vocab_size: int = 151_936
    hidden_size: int = 2048
    num_tokens: tuple[int, ...] = (2048, 8192)
    dtype: str = "bfloat16"
    num_turns: int = 7


TINY = Sizes(vocab_size=1000, hidden_size=32, num_tokens=(64, 128), dtype="float32", num_turns=2)
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def main(arguments: Sequence[str]) -> int:
    """Measure as the command line says and return the exit code."""
    given = make_part_parser("logprob", __doc__).parse_args(arguments)
    return run_part(given, lambda: measure(TINY if given.quick else Sizes()), check)


def measure(sizes: Sizes) -> list[Row]:
    """Return a row per number of tokens and way."""
    return [row for num_tokens in sizes.num_tokens for row in measure_ways(num_tokens, sizes)]


def measure_ways(num_tokens: int, sizes: Sizes) -> list[Row]:
    """Return a row per way; the ways take turns, and the first turn only warms up."""
    inputs = make_inputs(sizes, num_tokens)
    seconds: dict[str, list[float]] = {name: [] for name in WAYS}
    peaks: dict[str, float] = {}
    for turn, name in itertools.product(range(1 + sizes.num_turns), WAYS):
        call = partial(differentiate, name, inputs, sizes)
        if turn:
            seconds[name].append(time_call(call))
        else:
            peaks[name] = measure_peak(call)
    return [make_row(name, num_tokens, found, peaks[name], sizes) for name, found in seconds.items()]


def make_row(name: str, num_tokens: int, seconds: list[float], peak_bytes: float, sizes: Sizes) -> Row:
    """Return what one way took, its turns apart."""
    case: dict[str, str | int | float] = {"way": name, "num_tokens": num_tokens}
    case |= {"vocab_size": sizes.vocab_size, "hidden_size": sizes.hidden_size, "dtype": sizes.dtype}
    rates = [num_tokens / taken_s for taken_s in seconds]
    return Row.of("gpu.logprob", case, {"seconds": seconds, "tokens_per_s": rates, "peak_bytes": peak_bytes})


def make_inputs(sizes: Sizes, num_tokens: int) -> Inputs:
    """Return hidden states, weight and labels on the GPU, if there is one."""
    device = find_device()
    generator = torch.Generator().manual_seed(0)
    dtype = getattr(torch, sizes.dtype)
    hidden_NH = torch.randn(num_tokens, sizes.hidden_size, generator=generator)
    weight_VH = torch.randn(sizes.vocab_size, sizes.hidden_size, generator=generator)
    weight_VH.mul_(2.0 / sizes.hidden_size**0.5)
    labels_N = torch.randint(0, sizes.vocab_size, (num_tokens,), generator=generator)
    placed = [tensor.to(device, dtype).requires_grad_() for tensor in (hidden_NH, weight_VH)]
    return placed[0], placed[1], labels_N.to(device)


def differentiate(name: str, inputs: Inputs, sizes: Sizes) -> list[torch.Tensor]:
    """Return log-probs, entropies and the gradients of hidden states and weight of one training loss."""
    logprobs_N, entropy_N = WAYS[name](*inputs, sizes.vocab_size)
    loss = -logprobs_N.mean() - 0.01 * entropy_N.mean()
    return [logprobs_N.detach(), entropy_N.detach(), *torch.autograd.grad(loss, inputs[:2])]


def _fused(
    hidden_NH: torch.Tensor, weight_VH: torch.Tensor, labels_N: torch.Tensor, vocab_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    found = fused_logprobs(
        hidden_NH, weight_VH, labels_N, vocab_size=vocab_size, temperature=TEMPERATURE, group=None
    )
    return found[0], found[1]


def _plain(
    hidden_NH: torch.Tensor, weight_VH: torch.Tensor, labels_N: torch.Tensor, vocab_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    logp_NV = ((hidden_NH @ weight_VH.T).float() / TEMPERATURE).log_softmax(-1)
    return logp_NV.gather(1, labels_N[:, None])[:, 0], -(logp_NV.exp() * logp_NV).sum(-1)


WAYS = {"fused": _fused, "plain": _plain}


def check(rows: Sequence[Row]) -> Verdict:
    """Judge time and memory of the fused way at the most tokens."""
    most = max(row.case["num_tokens"] for row in rows)
    found = {row.case["way"]: row.values for row in rows if row.case["num_tokens"] == most}
    fused, plain = found["fused"], found["plain"]
    ratios = {"time of the plain way": plain["seconds"] / fused["seconds"] / TARGET_SPEED}
    if fused["peak_bytes"]:
        share = fused["peak_bytes"] / plain["peak_bytes"]
        ratios[f"a tenth of its memory, {share:.1%}"] = TARGET_MEMORY / share
    return judge(ratios)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
