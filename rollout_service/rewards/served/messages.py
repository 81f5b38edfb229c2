"""Messages between a reward and the process or the server that computes it (pure).

Invariant: both sides check what arrives against these; what an answer holds of the user's is any plain value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypedDict

import msgspec

from rollout_service.rewards.score import Fault

Plain = str | list[dict[str, object]]
"""A prompt: a text, or the messages of a chat."""


class PlainAnswer(TypedDict):
    """An answer and its task; a server gets it as JSON."""

    prompt: Plain
    response: str
    ground_truth: object
    data_source: str
    extra_info: Mapping[str, object]
    finish_reason: str
    num_tokens: int
    row: int


class ModelItem(TypedDict):
    """Input of a reward model for one answer."""

    prompt: Plain
    response: str
    row: int


class FunctionSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Function that the process of a pool calls, see `BoundFunction`."""

    name: str
    function: str
    arguments: dict[str, object]


@dataclass(frozen=True)
class ModelSettings:
    """Model that scores, and its device.

    Attributes:
        path: Folder of a sequence classifier and its tokenizer.
        label: Index of the label whose probability is the reward; None takes the only logit of a model
            with one label.
        device: `cpu` or `cuda`, a share of the replica's GPU.
        dtype: Of the weights.
    """

    path: str
    label: int | None = None
    device: str = "cpu"
    dtype: str = "float32"


class Judged(msgspec.Struct, frozen=True):
    """The number of an answer, or why there is none."""

    value: float | None = None
    error: str | None = None
    kind: Fault = "raised"
    reason: str = ""


class Batch(TypedDict):
    """Answers that a model scores at once."""

    items: list[ModelItem]


class BatchScores(msgspec.Struct, frozen=True):
    """A number per item, or why there is none."""

    scores: list[float | tuple[Fault, str]]
