"""Settings that a learner cannot use when it begins before its batch is complete (pure).

Owns the reasons. With `learner.stream` a token is trained before the last group of its batch is there, and
the weights and denominators of the whole batch come after it: nothing may depend on the rest of the batch
but one division of the loss at the end. Every other setting gives the gradients of the whole batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from asyncrl.core.variants import estimators, losses

if TYPE_CHECKING:
    from asyncrl.core.config.root import Root
    from asyncrl.core.config.sections.algorithm import AlgorithmSection

BATCH_WIDE = {name: one.batch_wide for name, one in estimators().items() if one.batch_wide}
"""Advantages that are not those of a group alone, and why."""
PICKS_TOKENS = tuple(name for name, one in losses().items() if one.picks_tokens)
"""Losses that single out tokens of the microbatch at hand, which streaming cuts otherwise."""
BY_ROWS = tuple(name for name, one in losses().items() if one.aggregation)
"""Losses that are a mean over rows, whatever `aggregation` says of the others."""
MEANS_OF_ROWS = ("seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")

Found = tuple[tuple[str, ...], str, str]
"""Keys, what does not fit, what to do."""
Reason = tuple[str, object, str]
"""A key, its value, and why that cannot be streamed."""


def find_stream_conflicts(config: Root) -> Iterator[Found]:
    """Yield what cannot be streamed, with the reason; nothing without `learner.stream`."""
    if not config.learner.stream:
        return
    for key, value, why in (
        *_find_in_learner(config),
        *_find_in_advantage(config.algorithm),
        *_find_in_loss(config.algorithm),
    ):
        said = str(value).lower() if isinstance(value, bool) else value
        what = f"learner.stream does not go with {key}: {said}, {why}"
        yield ("learner.stream", key), what, f"Leave learner.stream out, or choose another {key}"


def _find_in_learner(config: Root) -> Iterator[Reason]:
    learner, dtype = config.learner, config.model.dtype
    if learner.minibatches > 1:
        why = "which are cut from the whole batch in ticket order and each update the weights"
        yield "learner.minibatches", learner.minibatches, why
    for name in ("router_aux_loss", "router_z_loss"):
        if value := getattr(learner, name):
            yield f"learner.{name}", value, "which has another divisor than the policy's loss"
    if learner.overlap:
        yield "learner.overlap", True, "which sends gradients before the parts to come are in them"
    if dtype == "float16":
        yield "model.dtype", dtype, "whose gradients overflow before they are divided"


def _find_in_advantage(section: AlgorithmSection) -> Iterator[Reason]:
    name = section.advantage
    if ":" in name:
        yield "algorithm.advantage", name, "which may need the whole batch"
    if name in BATCH_WIDE:
        yield "algorithm.advantage", name, f"which {BATCH_WIDE[name]}"
    if ":" in section.correction:
        yield "algorithm.correction", section.correction, "which may need the whole batch"
    if section.normalize_weights:
        yield "algorithm.normalize_weights", True, "which divides by the mean weight of the whole batch"


def _find_in_loss(section: AlgorithmSection) -> Iterator[Reason]:
    name = section.loss
    if ":" in name:
        yield "algorithm.loss", name, "whose divisor is not known"
    if name in PICKS_TOKENS:
        yield "algorithm.loss", name, "which picks tokens of a microbatch: parts are cut into others"
    has_terms = section.entropy_coeff > 0 or (section.kl.coef > 0 and section.kl.where == "loss")
    if name in BY_ROWS and has_terms and section.aggregation not in MEANS_OF_ROWS:
        why = f"a mean over rows beside an entropy or KL term that is a {section.aggregation}"
        yield "algorithm.loss", name, why
