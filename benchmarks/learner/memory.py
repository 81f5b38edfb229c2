"""Memory of log-probs over a large vocabulary: fused and in tiles against full logits.

Forward and backward at a vocabulary of 151,936 entries, each measurement in a process of its own: the
peak of its resident memory above what it held when the call began. The plain way needs about 25 GB for
8,192 tokens; where that is not free it is measured at fewer tokens and scaled, and the report says so.
Must never start more than one measuring process at a time.
"""

from __future__ import annotations

import json
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.harness.options import Verdict, judge, make_parser, report
from learner.numerics.fused_logprob import fused_logprobs

VOCAB, TEMPERATURE = 151_936, 0.8
NUM_TOKENS, NUM_PLAIN_TOKENS, NUM_COMPARED_TOKENS = 8192, 1024, 64
HIDDEN_SIZE, QUICK_HIDDEN_SIZE = 256, 64
PLAIN_BYTES_PER_LOGIT = 24.0
"""A generous guess of what the plain way needs, to decide whether it fits."""
TARGET_SHARE, TARGET_ERROR = 0.10, 1e-5

Way = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def main(arguments: Sequence[str]) -> int:
    """Measure as the command line says and return the exit code."""
    parser = make_parser("asyncrl bench memory", __doc__, quick="a smaller hidden size: under a minute")
    given = parser.parse_args(arguments)
    return report(given, measure(quick=given.quick), table, check)


def measure(*, quick: bool) -> dict[str, Any]:
    """Run the measuring processes and return all figures."""
    hidden_size = QUICK_HIDDEN_SIZE if quick else HIDDEN_SIZE
    num_plain = NUM_PLAIN_TOKENS if quick else _affordable_tokens()
    fused = _run_alone("fused", NUM_TOKENS, hidden_size)
    plain = _run_alone("plain", num_plain, hidden_size)
    gradient_bytes = 4 * VOCAB * hidden_size  # the weight's gradient does not grow with the tokens
    plain_bytes = (plain["extra_bytes"] - gradient_bytes) * NUM_TOKENS / num_plain + gradient_bytes
    logits_bytes = 4 * VOCAB * NUM_TOKENS
    return {
        "benchmark": "memory",
        "quick": quick,
        "machine": {"processor": platform.machine(), "python": platform.python_version()},
        "vocab_size": VOCAB,
        "num_tokens": NUM_TOKENS,
        "hidden_size": hidden_size,
        "fused": fused,
        "plain": plain,
        "plain_tokens": num_plain,
        "plain_extra_bytes_at_all_tokens": plain_bytes,
        "logits_bytes": logits_bytes,
        "share_of_plain": fused["extra_bytes"] / plain_bytes,
        "share_of_one_copy_of_the_logits": fused["extra_bytes"] / logits_bytes,
        "errors": _run_alone("errors", NUM_COMPARED_TOKENS, hidden_size),
    }


def _affordable_tokens() -> int:
    """Return the largest power-of-two share of the tokens whose plain way surely fits into free memory."""
    num_tokens = NUM_TOKENS
    while (
        num_tokens > NUM_PLAIN_TOKENS
        and num_tokens * VOCAB * PLAIN_BYTES_PER_LOGIT > 0.6 * psutil.virtual_memory().available
    ):
        num_tokens //= 2
    return num_tokens


def _run_alone(what: str, num_tokens: int, hidden_size: int) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.learner.memory", what, str(num_tokens), str(hidden_size)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    found: dict[str, float] = json.loads(done.stdout)
    return found


def _fused(
    hidden_NH: torch.Tensor, weight_VH: torch.Tensor, labels_N: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    logprobs_N, entropy_N = fused_logprobs(
        hidden_NH, weight_VH, labels_N, vocab_size=VOCAB, temperature=TEMPERATURE, group=None
    )
    return logprobs_N, entropy_N


def _plain(
    hidden_NH: torch.Tensor, weight_VH: torch.Tensor, labels_N: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    logp_NV = (hidden_NH @ weight_VH.T / TEMPERATURE).log_softmax(-1)
    return logp_NV.gather(1, labels_N[:, None])[:, 0], -(logp_NV.exp() * logp_NV).sum(-1)


WAYS: dict[str, Way] = {"fused": _fused, "plain": _plain}


def _make_inputs(num_tokens: int, hidden_size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden_NH = torch.randn(num_tokens, hidden_size, generator=generator)
    weight_VH = torch.randn(VOCAB, hidden_size, generator=generator).mul_(2.0 / hidden_size**0.5)
    labels_N = torch.randint(0, VOCAB, (num_tokens,), generator=generator)
    return hidden_NH.requires_grad_(), weight_VH.requires_grad_(), labels_N


def _differentiate(way: Way, inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> list[torch.Tensor]:
    """Return log-probs, entropies and the gradients of hidden states and weight of one training loss."""
    logprobs_N, entropy_N = way(*inputs)
    loss = -logprobs_N.mean() - 0.01 * entropy_N.mean()
    gradients = torch.autograd.grad(loss, inputs[:2])
    return [logprobs_N.detach(), entropy_N.detach(), *gradients]


def measure_way(what: str, num_tokens: int, hidden_size: int) -> dict[str, float]:
    """Return seconds and peak extra bytes of one forward and backward pass in this process."""
    inputs = _make_inputs(num_tokens, hidden_size)
    _differentiate(WAYS[what], (inputs[0][:1], inputs[1], inputs[2][:1]))
    held_bytes, began = psutil.Process().memory_info().rss, time.perf_counter()
    _differentiate(WAYS[what], inputs)
    seconds = time.perf_counter() - began
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"extra_bytes": float(peak_bytes - held_bytes), "seconds": seconds}


def measure_errors(num_tokens: int, hidden_size: int) -> dict[str, float]:
    """Return the largest error of each tensor of the fused way, relative to its largest entry.

    Against the plain way in float64: in float32 the plain way is itself up to ten times further off.
    """
    inputs = _make_inputs(num_tokens, hidden_size)
    hidden_NH, weight_VH = (tensor.detach().double().requires_grad_() for tensor in inputs[:2])
    found, exact = _differentiate(_fused, inputs), _differentiate(_plain, (hidden_NH, weight_VH, inputs[2]))
    names = ("logprobs", "entropy", "hidden_gradient", "weight_gradient")
    return {
        name: float((ours - reference).abs().max() / reference.abs().max())
        for name, ours, reference in zip(names, found, exact, strict=True)
    }


def table(results: dict[str, Any]) -> str:
    """Return the figures as text."""
    gib, fused = 1 << 30, results["fused"]
    is_scaled = results["plain_tokens"] != results["num_tokens"]
    source = f"scaled from {results['plain_tokens']} tokens" if is_scaled else "measured"
    plain_gib = results["plain_extra_bytes_at_all_tokens"] / gib
    sizes = (
        f"{results['num_tokens']} tokens, {results['vocab_size']} entries, hidden {results['hidden_size']}"
    )
    of_logits = f"{results['share_of_one_copy_of_the_logits']:.2%} of one copy of the logits"
    lines = [
        f"{sizes}, float32, forward and backward",
        f"fused: {fused['extra_bytes'] / gib:.3f} GiB at the peak, {fused['seconds']:.1f} s",
        f"full logits: {plain_gib:.2f} GiB ({source})",
        f"share of the full-logits way: {results['share_of_plain']:.2%}; {of_logits}",
        "largest error: " + ", ".join(f"{name} {error:.1e}" for name, error in results["errors"].items()),
    ]
    return "\n".join(lines)


def check(results: dict[str, Any]) -> Verdict:
    """Return whether every target is met, and the worst ratio to a target as a sentence."""
    ratios = {
        f"share of the full-logits way, target {TARGET_SHARE:.0%}": TARGET_SHARE / results["share_of_plain"],
        f"largest error, target {TARGET_ERROR:g}": TARGET_ERROR / max(1e-12, *results["errors"].values()),
    }
    return judge(ratios)


if __name__ == "__main__":
    _what, _num_tokens, _hidden_size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    _measure = measure_errors if _what == "errors" else (lambda *sizes: measure_way(_what, *sizes))
    print(json.dumps(_measure(_num_tokens, _hidden_size)))
