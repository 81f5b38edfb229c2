"""Rates that nobody has measured: what a model of a size should do on a kind of GPU.

Every figure of the table is an assumption: the makers' dense bf16 peaks and bandwidths, and shares of them
that good software reaches. Rates made here say so in `Rates.source` and `notes`; measured ones beat them.
"""

from __future__ import annotations

from dataclasses import dataclass

from asyncrl.core.config.tree import Config
from asyncrl.core.errors import ConfigError
from asyncrl.models.architectures import ModelSize
from asyncrl.planner.plan.footprint.shared_memory import count_weights
from asyncrl.planner.plan.footprint.sizes import count_held_weights
from asyncrl.planner.plan.footprint.version_cost import ASSUMED_WEIGHTS, VersionCost
from asyncrl.planner.rates import ASSUMED, Rates

GIGA, TERA = 1e9, 1e12
ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
DECODE_BANDWIDTH_SHARE = 0.6
DECODE_FLOPS_SHARE = 0.5
DECODE_STEP_S = 0.004
"""Of a decoding step besides the arithmetic: launches, scheduling, sampling."""
MFU = 0.35
LEARNER_STEP_S = 1.0
LEARNER_PART_S = 0.1
COPY_BYTES_PER_S = 10 * GIGA
WRITE_BYTES_PER_S = 0.5 * GIGA
"""Of each rank, to the host and to disk."""
MOMENT_BYTES, MAIN_BYTES = 8, 4
"""Of each weight in a checkpoint: AdamW's two moments, and the float32 copy of a 16-bit weight."""
REPLICA_START_S = 60.0
BACKWARD_FORWARDS = 4.0
"""Forward passes that forward and backward with recomputed activations are worth."""
POINTS = (1, 4, 16, 64, 128, 256, 512, 1024)


@dataclass(frozen=True)
class Gpu:
    """A kind of GPU: dense bf16 peak, in TFLOP/s, memory bandwidth, in GB/s, and memory, in GB."""

    tflops: float
    gb_per_s: float
    gb: int

    @property
    def num_bytes(self) -> int:
        """Memory in bytes."""
        return self.gb * 10**9


GPUS = {
    "A100": Gpu(312.0, 2039.0, 80),
    "H100": Gpu(989.0, 3350.0, 80),
    "H200": Gpu(989.0, 4800.0, 141),
    "B200": Gpu(2250.0, 8000.0, 180),
    "L40S": Gpu(362.0, 864.0, 48),
}


def assume_rates(config: Config, size: ModelSize, kind: str, mean_tokens: float) -> Rates:
    """Return what a run of a model of this size should do on GPUs of `kind`.

    Args:
        mean_tokens: Of a prompt and half of its answer: what a decoding step reads of one request's cache.

    Raises:
        ConfigError: There is no such GPU in the table.
    """
    if kind not in GPUS:
        raise ConfigError(f"no figures for the GPU '{kind}'", hint=f"There are some for {', '.join(GPUS)}")
    gpu = GPUS[kind]
    item = ITEM_BYTES[config.model.dtype]
    num_gpus = config.rollout.gpus or 1  # a share of one computes that share
    num_ranks = config.learner.num_ranks * min(1.0, config.learner.gpus or 1.0)
    num_held = count_held_weights(size)
    model_bytes = num_held * item  # a batch meets every expert
    cache_bytes = size.num_cached * item
    peak, bandwidth = gpu.tflops * TERA * num_gpus, gpu.gb_per_s * GIGA * num_gpus

    def step_s(num_running: float) -> float:
        read_s = (model_bytes + num_running * mean_tokens * cache_bytes) / bandwidth / DECODE_BANDWIDTH_SHARE
        compute_s = 2 * size.num_weights * num_running / peak / DECODE_FLOPS_SHARE
        return max(read_s, compute_s) + DECODE_STEP_S

    looks_back = config.algorithm.prox != "behaviour"
    forwards = BACKWARD_FORWARDS + looks_back + (config.algorithm.kl.coef > 0)
    version_bytes = (count_weights(config.model.path) or num_held) * item
    version = VersionCost.of(config, version_bytes)
    saved_bytes = num_held * (item + MOMENT_BYTES + (MAIN_BYTES if item < MAIN_BYTES else 0))
    return Rates(
        decode=tuple((float(n), n / step_s(n)) for n in POINTS),
        prefill_s_per_token=2 * size.num_weights / peak / DECODE_FLOPS_SHARE,
        step_s=LEARNER_STEP_S,
        step_s_per_token=2 * size.num_weights * forwards / (gpu.tflops * TERA * num_ranks * MFU),
        part_s=LEARNER_PART_S,
        checkpoint_s=saved_bytes / num_ranks / COPY_BYTES_PER_S,
        checkpoint_write_s=saved_bytes / num_ranks / WRITE_BYTES_PER_S,
        publish_s=version.export_s(ASSUMED_WEIGHTS),
        transfer_s=version.transfer_s(ASSUMED_WEIGHTS),
        version_bytes=float(version_bytes),
        swap_s=version.load_s(ASSUMED_WEIGHTS),
        start_s=REPLICA_START_S,
        source=f"{kind}, {ASSUMED}",
        notes={"assumption": f"{kind}: {gpu.tflops:g} TFLOP/s, {gpu.gb_per_s:g} GB/s, MFU {MFU:g}"},
    )
