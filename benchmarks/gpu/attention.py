"""Attention within packed rows, forward and backward: the learner's kernels beside others that are installed.

Run: `python -m benchmarks.gpu.attention --check`. The heads of a Qwen3 of 1.7 B in bfloat16, 8,192 packed
tokens: two rows of 4,096, one of 8,192, and rows of log-normal lengths. FLOPs are counted causally, within
rows. The error is the largest against float32, row by row, relative to the largest entry. A kernel that
fails is told and does not end the others. `--quick` is for any machine. Not run on a GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch.nn import functional

from benchmarks.gpu.frame import NOT_JUDGED, find_device, make_part_parser, run_part, time_turns
from benchmarks.harness.options import Verdict, judge
from benchmarks.harness.rows import Row
from learner.attention import varlen
from learner.attention.layout import lay_out
from learner.attention.pieces import whole_rows

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(queries [N, h, D], keys [N, g, D], values [N, g, D]) -> outputs [N, h, D]."""
MAX_ERROR = 0.02
"""Of bfloat16's 8 bits of mantissa, through a forward and a backward pass."""


@dataclass(frozen=True)
class Sizes:
    """Heads, tokens and turns."""

    num_heads: int = 16
    num_key_value_heads: int = 8
    head_size: int = 128
    num_tokens: int = 8192
    dtype: torch.dtype = torch.bfloat16
    num_turns: int = 10


TINY = Sizes(num_heads=4, num_key_value_heads=2, head_size=16, num_tokens=256, num_turns=2)


def main(arguments: Sequence[str]) -> int:
    """Measure as the command line says and return the exit code."""
    given = make_part_parser("attention", __doc__).parse_args(arguments)
    return run_part(given, lambda: measure(TINY if given.quick else Sizes()), check)


def measure(sizes: Sizes) -> list[Row]:
    """Return a row per lengths and kernel."""
    return [
        row for name, lengths in make_lengths(sizes).items() for row in _measure_kernels(sizes, name, lengths)
    ]


def make_lengths(sizes: Sizes) -> dict[str, list[int]]:
    """Return the lengths of rows that fill all tokens, by name."""
    ragged: list[int] = []
    generator, left = np.random.default_rng(0), sizes.num_tokens
    while left:
        drawn = generator.lognormal(np.log(sizes.num_tokens / 12), 0.8)
        ragged.append(min(left, max(16, int(drawn))))
        left -= ragged[-1]
    half = sizes.num_tokens // 2
    return {"equal": [half, half], "one": [sizes.num_tokens], "ragged": ragged}


def _measure_kernels(sizes: Sizes, name: str, lengths: list[int]) -> list[Row]:
    device, generator = find_device(), torch.Generator().manual_seed(0)
    heads = (sizes.num_heads, sizes.num_key_value_heads, sizes.num_key_value_heads)
    inputs = [
        torch.randn(sizes.num_tokens, count, sizes.head_size, generator=generator).to(device, sizes.dtype)
        for count in heads
    ]
    exact = differentiate(partial(attend_row_by_row, lengths), [tensor.float() for tensor in inputs])
    pairs = sum(length * (length + 1) / 2 for length in lengths)
    flops = 3 * 4 * pairs * sizes.num_heads * sizes.head_size
    rows = []
    for kernel, make in KERNELS.items():
        try:
            attend = make(sizes, lengths)
            if attend is None:
                continue
            error = largest_error(differentiate(attend, inputs), exact)
            seconds = time_turns(partial(differentiate, attend, inputs), sizes.num_turns)
        except Exception as failure:  # of a library that may be of any version: the others are measured
            print(f"{kernel}, {name}: {type(failure).__name__}: {failure}", file=sys.stderr)
            continue
        rates = [flops / taken_s for taken_s in seconds]
        case: Mapping[str, str | int] = {"lengths": name, "rows": len(lengths), "kernel": kernel}
        samples: dict[str, float | list[float]] = {"seconds": seconds, "flops_per_s": rates, "error": error}
        rows.append(Row.of("gpu.attention", case, samples))
    return rows


def differentiate(attend: Attend, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the outputs and the gradients of all inputs, of the sum of the outputs' squares."""
    query, key, value = (tensor.detach().requires_grad_() for tensor in inputs)
    output = attend(query, key, value)
    return [output.detach(), *torch.autograd.grad(output, (query, key, value), output.detach())]


def largest_error(found: Sequence[torch.Tensor], exact: Sequence[torch.Tensor]) -> float:
    """Return the largest difference, each tensor's relative to its largest entry."""
    pairs = zip(found, exact, strict=True)
    return max(float((ours.float() - true).abs().max() / true.abs().max()) for ours, true in pairs)


def attend_row_by_row(
    lengths: list[int], query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> torch.Tensor:
    """Attend within each row by itself: the plainest form there is."""
    outputs = []
    for parts in zip(*(tensor.split(lengths) for tensor in (query, key, value)), strict=True):
        q, k, v = (part.transpose(0, 1)[None] for part in parts)
        output = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        outputs.append(output[0].transpose(0, 1))
    return torch.cat(outputs)


def _ours(is_varlen: bool, sizes: Sizes, lengths: list[int]) -> Attend | None:
    device = find_device()
    if is_varlen and not varlen.can_run(device, sizes.dtype, [sizes.head_size]):
        return None
    layout = lay_out(whole_rows(_offsets(lengths)), device, is_varlen=is_varlen)
    return lambda query, key, value: layout.attend(query, key, value, None)


def _flash_attn(sizes: Sizes, lengths: list[int]) -> Attend | None:
    try:
        from flash_attn import flash_attn_varlen_func
    except ImportError:
        return None
    offsets = torch.tensor(_offsets(lengths), dtype=torch.int32, device=find_device())
    bounds = (offsets, offsets, max(lengths), max(lengths))
    return lambda query, key, value: flash_attn_varlen_func(query, key, value, *bounds, causal=True)


def _transformer_engine(sizes: Sizes, lengths: list[int]) -> Attend | None:
    try:
        from transformer_engine.pytorch import DotProductAttention
    except ImportError:
        return None
    attention = DotProductAttention(
        sizes.num_heads,
        sizes.head_size,
        num_gqa_groups=sizes.num_key_value_heads,
        attention_dropout=0.0,
        qkv_format="thd",
        attn_mask_type="padding_causal",
    )
    offsets = torch.tensor(_offsets(lengths), dtype=torch.int32, device=find_device())
    bounds = {"cu_seqlens_q": offsets, "cu_seqlens_kv": offsets}
    longest = {"max_seqlen_q": max(lengths), "max_seqlen_kv": max(lengths)}
    return lambda query, key, value: attention(query, key, value, **bounds, **longest).view_as(query)


KERNELS: Mapping[str, Callable[[Sizes, list[int]], Attend | None]] = {
    "varlen": partial(_ours, True),
    "rectangles": partial(_ours, False),
    "row_by_row": lambda sizes, lengths: partial(attend_row_by_row, lengths),
    "flash_attn": _flash_attn,
    "transformer_engine": _transformer_engine,
}
"""None where it is not installed or does not run here."""


def _offsets(lengths: Sequence[int]) -> list[int]:
    return [0, *np.cumsum(lengths).tolist()]


def check(rows: Sequence[Row]) -> Verdict:
    """Judge the errors, and the learner's choice against every other kernel."""
    ratios = {}
    for lengths in dict.fromkeys(row.case["lengths"] for row in rows):
        found = {row.case["kernel"]: row.values for row in rows if row.case["lengths"] == lengths}
        ours = "varlen" if "varlen" in found else "rectangles"
        for kernel, values in found.items():
            ratios[f"error of {kernel}, {lengths}"] = MAX_ERROR / max(values["error"], 1e-9)
            ratios[f"{ours} of {kernel}, {lengths}"] = values["seconds"] / found[ours]["seconds"]
    return judge(ratios) if ratios else NOT_JUDGED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
