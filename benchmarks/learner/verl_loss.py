"""Advantage, importance weights and policy loss against verl's own functions, side by side.

Owns the import of verl's functions and the batch that both sides get: 512 rows of 4,096 positions whose
real lengths are log-normal. What is measured on verl's side is verl's own source, unchanged; packages
that it imports and these functions never use have empty stand-ins while it is imported. Invariant: no
time counts unless both sides gave the same loss and the same gradient.

Shapes: B rows, T columns, N packed positions.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import statistics
import sys
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from learner.algorithms.advantage import ADVANTAGES, AdvantageInput
from learner.algorithms.aggregation import aggregate
from learner.algorithms.correction import Correction, importance_weights
from learner.algorithms.diagnostics.divergence import importance_metrics
from learner.algorithms.losses import POLICY_LOSSES, Clip, LossInput
from learner.algorithms.rows import Rows, masked, padded_rows

VERSION = "0.9.1"
HOW_TO_GET = (
    f"verl is not importable: `pip install --no-deps --target DIR verl=={VERSION}` puts it into DIR, "
    "and `--verl DIR` measures against it"
)
CLIP = Clip(0.2, 0.28, 3.0)
UPPER = 2.0
MEDIAN_TOKENS, SIGMA = 512, 1.0
STAGES = ("advantage", "weights", "loss")
TARGET_ERROR = 1e-5

_PACKAGES = ("verl", "verl.utils", "verl.workers", "verl.trainer", "verl.trainer.ppo")
"""Entered without their `__init__`, which would import the whole trainer."""

_STAND_INS = {
    "omegaconf": ("DictConfig",),
    "tensordict": ("TensorDict",),
    "verl.protocol": ("DataProto",),
    "verl.workers.config": ("ActorConfig",),
    "verl.workers.config.actor": ("PolicyLossConfig",),
}
"""Names that verl imports for annotations, or for functions that are not measured here."""

Stage = Callable[[], None]


@dataclass(frozen=True)
class VerlFunctions:
    """Verl's own functions, from the folder `origin`."""

    origin: str
    advantage: Callable[..., Any]
    weights: Callable[..., Any]
    loss: Callable[..., Any]


@dataclass(frozen=True)
class LossBatch:
    """One batch, padded: every `_BT` field is [B, T] float32."""

    rewards_BT: torch.Tensor
    mask_BT: torch.Tensor
    logprobs_BT: torch.Tensor
    old_BT: torch.Tensor
    behaviour_BT: torch.Tensor
    scores_B: torch.Tensor
    group_B: torch.Tensor


@dataclass
class Outcome:
    """Last results of a side: advantages and weights of all positions, the loss and its gradient."""

    advantages: torch.Tensor | None = None
    weights: torch.Tensor | None = None
    loss: float = 0.0
    gradient: torch.Tensor | None = None


def load_verl(folder: Path | None) -> VerlFunctions | None:
    """Return verl's functions from `folder`, or from the installed verl; None if there is none."""
    path = folder / "verl" if folder is not None else _find_installed()
    if path is None or not (path / "trainer/ppo/core_algos.py").is_file():
        return None
    with _stand_ins(path):
        groupwise = importlib.import_module("verl.utils.groupwise")
        vars(sys.modules["verl.utils"]).update({name: getattr(groupwise, name) for name in groupwise.__all__})
        algorithms = importlib.import_module("verl.trainer.ppo.core_algos")
        correction = importlib.import_module("verl.trainer.ppo.rollout_corr_helper")
    return VerlFunctions(
        str(path),
        algorithms.compute_grpo_outcome_advantage,
        correction.compute_rollout_correction_weights,
        algorithms.compute_policy_loss_vanilla,
    )


def _find_installed() -> Path | None:
    found = importlib.util.find_spec("verl")
    return (
        Path(next(iter(found.submodule_search_locations)))
        if found and found.submodule_search_locations
        else None
    )


@contextlib.contextmanager
def _stand_ins(path: Path) -> Iterator[None]:
    """Within the block packages have no `__init__` and stand-ins exist; afterwards no trace is left."""
    before = set(sys.modules)
    for name in _PACKAGES:
        package = types.ModuleType(name)
        package.__path__ = [str(path.joinpath(*name.split(".")[1:]))]
        sys.modules[name] = package
    for name, attributes in _STAND_INS.items():
        module = types.ModuleType(name)
        vars(module).update({attribute: type(attribute, (), {}) for attribute in attributes})
        sys.modules.setdefault(name, module)
    try:
        yield
    finally:
        for name in {name for name in sys.modules if name.partition(".")[0] == "verl"} | set(
            _STAND_INS
        ) - before:
            sys.modules.pop(name, None)


def make_loss_batch(num_rows: int, num_columns: int, group_size: int = 8, seed: int = 0) -> LossBatch:
    """Return rows of log-normal lengths with the log-probs of a policy that has moved a little."""
    generator = torch.Generator().manual_seed(seed)

    def noise(scale: float) -> torch.Tensor:
        return scale * torch.randn(num_rows, num_columns, generator=generator)

    median = MEDIAN_TOKENS * num_columns / 4096
    drawn_B = median * (SIGMA * torch.randn(num_rows, generator=generator)).exp()
    length_B = drawn_B.round().clamp(1, num_columns).long()
    mask_BT = (torch.arange(num_columns) < length_B[:, None]).float()
    scores_B = torch.randint(0, 2, (num_rows,), generator=generator).float()
    rewards_BT = torch.zeros(num_rows, num_columns)
    rewards_BT[torch.arange(num_rows), length_B - 1] = scores_B
    old_BT = -noise(1.0).abs()
    return LossBatch(
        rewards_BT,
        mask_BT,
        (old_BT + noise(0.1)).requires_grad_(),
        old_BT,
        old_BT + noise(0.1),
        scores_B,
        torch.arange(num_rows) // group_size,
    )


def verl_stages(functions: VerlFunctions, batch: LossBatch) -> tuple[dict[str, Stage], Outcome]:
    """Return verl's three stages, and where they leave their results."""
    out, index = Outcome(), batch.group_B.numpy().astype(np.str_)
    config: Any = _ActorSettings()

    def advantage() -> None:
        out.advantages = functions.advantage(batch.rewards_BT, batch.mask_BT, index)[0]

    def weights() -> None:
        log_ratio_BT = batch.old_BT - batch.behaviour_BT
        out.weights = functions.weights(log_ratio_BT, batch.mask_BT, "token", UPPER)[0]

    def loss() -> None:
        value, _ = functions.loss(
            batch.old_BT, batch.logprobs_BT, out.advantages, batch.mask_BT, "token-mean", config, out.weights
        )
        _differentiate(value, batch.logprobs_BT, out)

    return {"advantage": advantage, "weights": weights, "loss": loss}, out


class _ActorSettings:
    """Fields of its actor's configuration that verl's loss reads."""

    clip_ratio = CLIP.low
    clip_ratio_low = CLIP.low
    clip_ratio_high = CLIP.high
    global_batch_info: Mapping[str, Any] = types.MappingProxyType({})

    def get(self, name: str, default: float) -> float:
        return CLIP.dual if name == "clip_ratio_c" else default


def our_stages(batch: LossBatch, *, is_packed: bool) -> tuple[dict[str, Stage], Outcome]:
    """Return our three stages on the padded batch, or on its real positions alone."""
    out = Outcome()
    taken_N = (batch.mask_BT != 0).view(-1) if is_packed else slice(None)
    rewards_N, mask_N, old_N, behaviour_N = (
        x.detach().view(-1)[taken_N]
        for x in (batch.rewards_BT, batch.mask_BT, batch.old_BT, batch.behaviour_BT)
    )
    logprobs_N = batch.logprobs_BT.detach().view(-1)[taken_N].clone().requires_grad_()
    rows = padded_rows(*batch.mask_BT.shape)
    rows = Rows(rows.row_N[taken_N], rows.num_rows)
    num_tokens = float(mask_N.sum())

    def advantage() -> None:
        x = AdvantageInput(rewards_N, batch.scores_B, mask_N, rows, batch.group_B)
        out.advantages = ADVANTAGES["grpo"](x).advantages_N

    def weights() -> None:
        delta_N, correction = old_N - behaviour_N, Correction(level="token", upper=UPPER)
        importance_metrics(delta_N, mask_N, rows, correction)
        out.weights = importance_weights(delta_N, mask_N, rows, correction)

    def loss() -> None:
        assert out.advantages is not None and out.weights is not None, "the stages run in order"
        tokens = POLICY_LOSSES["vanilla"](
            LossInput(logprobs_N, old_N, out.advantages, mask_N, rows, CLIP, weights_N=out.weights)
        )
        weighted_N = tokens.loss_N * out.weights
        value = aggregate(
            weighted_N, mask_N, rows, "token-mean", num_tokens=num_tokens, num_rows=rows.num_rows
        )
        for metric_N in tokens.metrics.values():
            (masked(metric_N, mask_N).sum() / num_tokens).item()
        _differentiate(value, logprobs_N, out)

    return {"advantage": advantage, "weights": weights, "loss": loss}, out


def _differentiate(value: torch.Tensor, logprobs: torch.Tensor, out: Outcome) -> None:
    (out.gradient,) = torch.autograd.grad(value, logprobs)
    out.loss = value.item()


def measure(functions: VerlFunctions, num_rows: int, num_columns: int, num_turns: int) -> dict[str, Any]:
    """Time all sides in turns on one batch; return medians per stage, ratios and the largest difference."""
    batch = make_loss_batch(num_rows, num_columns)
    sides = {
        "verl": verl_stages(functions, batch),
        "padded": our_stages(batch, is_packed=False),
        "packed": our_stages(batch, is_packed=True),
    }
    seconds: dict[str, dict[str, list[float]]] = {side: {stage: [] for stage in STAGES} for side in sides}
    for turn in range(num_turns + 1):
        for side, (stages, _) in sides.items():
            _time_stages(stages, seconds[side])
        if turn == 0:  # it warmed up
            seconds = {side: {stage: [] for stage in STAGES} for side in sides}
    outcomes = {side: out for side, (_, out) in sides.items()}
    medians = {
        side: {stage: statistics.median(times) for stage, times in found.items()}
        for side, found in seconds.items()
    }
    return {
        "verl": functions.origin,
        "num_rows": num_rows,
        "num_columns": num_columns,
        "filled_share": float(batch.mask_BT.mean()),
        "seconds": seconds,
        "median_s": medians,
        "error": max(compare(outcomes["verl"], outcomes[side], batch) for side in ("padded", "packed")),
        "speed_up": {side: _ratios(seconds["verl"], seconds[side]) for side in ("padded", "packed")},
    }


def _time_stages(stages: Mapping[str, Stage], seconds: Mapping[str, list[float]]) -> None:
    for stage, run in stages.items():
        began = time.process_time()
        run()
        seconds[stage].append(time.process_time() - began)


def compare(reference: Outcome, ours: Outcome, batch: LossBatch) -> float:
    """Return the largest relative difference of loss and gradient on real positions.

    The loss's is relative to the sum of its tokens' sizes: advantages of both signs cancel to near 0.
    """
    assert reference.gradient is not None and ours.gradient is not None, "no stage has run"
    is_real_BT = batch.mask_BT != 0
    wanted_N = reference.gradient[is_real_BT]
    found_N = ours.gradient if ours.gradient.shape == wanted_N.shape else ours.gradient[is_real_BT.view(-1)]
    gradient_error = float((found_N - wanted_N).abs().max() / wanted_N.abs().max())
    # A token's loss is some -ratio * advantage, and so is its gradient.
    return max(gradient_error, abs(ours.loss - reference.loss) / float(wanted_N.abs().sum()))


def _ratios(
    reference: Mapping[str, Sequence[float]], ours: Mapping[str, Sequence[float]]
) -> dict[str, float]:
    """Return the median over turns of the ratio of both sides' times, without and with the weights."""
    found = {}
    for stages in (("advantage", "loss"), STAGES):
        turns = zip(_add(reference, stages), _add(ours, stages), strict=True)
        found[" + ".join(stages)] = statistics.median(theirs / mine for theirs, mine in turns)
    return found


def _add(seconds: Mapping[str, Sequence[float]], stages: Sequence[str]) -> list[float]:
    return [sum(turn) for turn in zip(*(seconds[stage] for stage in stages), strict=True)]
