"""Protocol of an inference engine as a replica uses it, and the values that pass between them.

Invariant: an engine serves one policy version at a time; `serving` moves only after a swap that
loaded all of the new weights, and a completion's spans come from the engine that sampled it.

Shapes: P prompt tokens, T response tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

from asyncrl.core.errors import EngineError
from asyncrl.core.staleness import PolicyVersion, Span
from asyncrl.core.status.replica import CacheStatus
from asyncrl.core.variants import ENGINES, EngineFacts, engine_facts

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from transformers import PreTrainedTokenizerBase

    from asyncrl.core.config.tree import Config
    from asyncrl.core.experts import Rows
    from weight_sync.memory.staging import Staged


class EngineDied(EngineError):
    """The engine's process is gone; this replica has to be started anew."""


class Interrupted(EngineError):
    """The request was ended from outside, by `Engine.interrupt`: no response, only its beginning.

    Attributes:
        completion: The tokens so far, possibly none; a later request may go on from them.
    """

    def __init__(self, message: str, *, completion: Completion, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.completion = completion

    def __reduce__(self) -> tuple[object, ...]:
        return partial(type(self), completion=self.completion, hint=self.hint), (self.message,)


@dataclass(frozen=True)
class Sampling:
    """Sampling of one response. No top-p, top-k or penalty: log-probs stay those of the policy.

    Attributes:
        temperature: 0 takes the most probable token.
        max_tokens: The response is cut after so many tokens.
        seed: Decides the response, given prompt and weights, whatever else is in the batch.
        ignores_eos: The response goes on to `max_tokens`, whatever is sampled.
        stop: The response ends with the token that completes one of these strings in its text.
    """

    temperature: float
    max_tokens: int
    seed: int
    ignores_eos: bool = False
    stop: tuple[str, ...] = ()


@dataclass(frozen=True)
class Completion:
    """One response, with what the engine says about it.

    Attributes:
        token_ids: int32 [T], the end-of-sequence token included.
        logprobs: float32 [T], of the sampled tokens at the sampling temperature.
        spans: Version that sampled each range of tokens, covering 0..T.
        finish_reason: `stop` (end of sequence or a stop string) or `length`.
        experts: Of the last tokens of prompt and response, as many as it has rows; None if none are recorded.
    """

    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    spans: tuple[Span, ...]
    finish_reason: str
    experts: Rows | None = None


class Engine(Protocol):
    """An inference engine. All calls come from one event loop."""

    @property
    def serving(self) -> PolicyVersion:
        """The version whose weights are loaded whole; number 0 before the first swap."""

    @property
    def is_loaded(self) -> bool:
        """Whether the weights are whole: False from a load that failed to the next that works."""

    @property
    def probe_gap(self) -> float | None:
        """Mean |engine - learner| log-prob of the last probe that passed, in nats; None without one."""

    async def start(self) -> None:
        """Load the model, ready for `generate`. Raises EngineError."""

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, request_id: str) -> Completion:
        """Sample one response of at least one token. Cancelling the call aborts the request.

        Raises:
            EngineError: The request cannot be run: an empty prompt, say, or one longer than the model takes.
            Interrupted: It was ended by `interrupt`.
        """

    async def interrupt(self) -> None:
        """End all requests in flight: each raises `Interrupted` with its tokens so far.

        Returns once they have ended. It works in the middle of a swap too, and pauses nothing.
        """

    async def swap(self, staged: Staged) -> None:
        """Load `staged` while requests stay in flight. After an EngineError generation stays paused.

        A swap whose caller is cancelled is brought to its end all the same.
        """

    def cache_status(self) -> CacheStatus | None:
        """Return the figures of the KV cache, None if the engine tells none."""

    def child_pids(self) -> list[int]:
        """Return the processes that must end with this one."""

    async def shutdown(self) -> None:
        """Stop the engine and its processes."""


class EngineVariant(EngineFacts, ABC):
    """One value of `rollout.engine`: the module `variant` of a package beside this module holds it."""

    def prepare(self, config: Config) -> None:
        """Set the environment that the engine reads at import, and start processes that take long."""

    @abstractmethod
    def build(self, config: Config, tokenizer: PreTrainedTokenizerBase) -> Engine:
        """Return the engine of a replica, not yet started."""


def engine_variant(name: str) -> EngineVariant:
    """Return the variant that `rollout.engine` names."""
    found = engine_facts(name)
    assert isinstance(found, EngineVariant), f"{ENGINES}.{name}.variant holds one"
    return found
