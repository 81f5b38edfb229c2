"""Model FLOPs utilisation and time per token: how well a step used its devices.

A backward pass takes twice the FLOPs of the forward pass, which `ModelSize` counts; once, where only adapters
are trained and matrices get no gradient. Recomputation and adapters are not counted.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from asyncrl.models.architectures import ModelSize
from learner.algorithms.diagnostics.summary import PER_TOKEN, per_token_metrics

PEAK_TFLOPS = {
    "B200": 2250.0,
    "H200": 989.0,
    "H100": 989.0,
    "H800": 989.0,
    "H20": 148.0,
    "A100": 312.0,
    "A800": 312.0,
    "L40S": 362.0,
    "L40": 181.0,
    "L4": 121.0,
    "A10": 125.0,
}
"""Dense bfloat16 peaks by device name, from the makers' data sheets; the first name found counts."""

_TOKEN_STAGES = ("old_log_prob", *PER_TOKEN)
_MEASURED_SIZE, _MEASURED_TIMES = 1024, 5


@dataclass(frozen=True)
class Efficiency:
    """Turns the stages of a step into shares of the peak. Make it with `make_efficiency`.

    Attributes:
        size: None where the model's shape is not known; there is no MFU then.
        peak_flops: Of one rank's device, per second.
        num_devices: Learner ranks.
        has_inference: Whether the stage `old_log_prob` holds a forward pass.
        has_adapters: Whether the policy's adapters alone are trained.
    """

    size: ModelSize | None
    peak_flops: float
    num_devices: int
    has_inference: bool = True
    has_adapters: bool = False

    def describe(
        self, metrics: Mapping[str, float], stages: Mapping[str, float], num_tokens: float
    ) -> dict[str, float]:
        """Return `timing_per_token_ms/*` and `perf/mfu/*`.

        Args:
            metrics: The step's, reduced; `perf/computed_tokens` and `perf/attention_pairs` are read.
            stages: `timing_s/<stage>` of the step.
            num_tokens: Prompt and response tokens of the whole step.
        """
        times = {name.removeprefix("timing_s/"): seconds for name, seconds in stages.items()}
        found = per_token_metrics(times, dict.fromkeys(_TOKEN_STAGES, num_tokens))
        num_pairs = metrics.get("perf/attention_pairs")
        if self.size is None or num_pairs is None:
            return found
        forward = self.size.forward_flops(metrics.get("perf/computed_tokens", num_tokens), num_pairs)
        passes = 2 if self.has_adapters else 3
        work = {"actor": ("update_actor", passes * forward), "critic": ("update_critic", 3 * forward)}
        if self.has_inference:
            work["actor_infer"] = ("old_log_prob", forward)
        peak = self.peak_flops * self.num_devices
        found |= {
            f"perf/mfu/{part}": flops / (times[stage] * peak)
            for part, (stage, flops) in work.items()
            if times.get(stage)
        }
        return found | {"perf/peak_tflops": self.peak_flops / 1e12}


def make_efficiency(
    model_path: Path,
    *,
    num_devices: int,
    dtype: str,
    peak_tflops: float | None = None,
    has_inference: bool = True,
    has_adapters: bool = False,
) -> Efficiency:
    """Return the efficiency of a model on this rank's device.

    Args:
        model_path: A Hugging Face folder.
        num_devices: Learner ranks.
        dtype: `bfloat16`, `float16` or `float32`.
        peak_tflops: The device's peak; None takes the data sheet's of a known GPU in 16 bits, and
            otherwise measures a product of two 1024 x 1024 matrices, on as many threads as the rank has.
        has_inference: Whether every step does a forward pass for prox.
        has_adapters: As in `Efficiency`.
    """
    peak = peak_tflops * 1e12 if peak_tflops is not None else find_peak_flops(dtype)
    return Efficiency(read_model_size(model_path), peak, num_devices, has_inference, has_adapters)


def read_model_size(folder: Path) -> ModelSize | None:
    """Return the shape of the dense decoder in `folder`, None if its config.json does not say it."""
    try:
        table = json.loads((folder / "config.json").read_text())
        return ModelSize.read(table)
    except (FileNotFoundError, KeyError):
        return None


def find_peak_flops(dtype: str) -> float:
    """Return the peak of this process's device per second: from the table, or measured."""
    if torch.cuda.is_initialized() and dtype != "float32":
        name = torch.cuda.get_device_name()
        known = next((peak for part, peak in PEAK_TFLOPS.items() if part in name), None)
        if known is not None:
            return known * 1e12
    return measure_peak_flops(getattr(torch, dtype), "cuda" if torch.cuda.is_initialized() else "cpu")


@functools.cache
def measure_peak_flops(dtype: torch.dtype, device: str) -> float:
    """Return the best rate at which this process multiplies two square matrices, in FLOPs per second."""
    matrix = torch.ones(_MEASURED_SIZE, _MEASURED_SIZE, dtype=dtype, device=device)
    best_s = min(_time_product(matrix) for _ in range(_MEASURED_TIMES))
    return 2.0 * _MEASURED_SIZE**3 / best_s


def _time_product(matrix: torch.Tensor) -> float:
    start = time.perf_counter()
    product = matrix @ matrix
    if product.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start
