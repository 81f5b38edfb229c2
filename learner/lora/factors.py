"""The two factors of an adapter as a module, their first values, and the model without adapters.

What both backends share: each hangs `Factors` on its own matrices. Names are those of the model's files, with
`lora_A` and `lora_B` in place of the matrix, as PEFT has them. Invariant: first values follow from the seed
and the name alone, so every layout of ranks and either backend begins with the same model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import xxhash

from asyncrl.core.config.tree import LoraSection
from learner.backend import LearnerBackend
from learner.batching.batch import PackedBatch
from learner.lora.folder import open_adapter, read_factor
from weight_sync.encoding.low_rank import WEIGHT, A, B

CHILD = "adapter"
"""Name of an adapter in the module of its matrix; not in the names of factors elsewhere."""
NO_ADAPTERS = LoraSection()
ReadTensor = Callable[[str], torch.Tensor]


class Factors(torch.nn.Module):
    """A [R, I] and B [O, R] of one matrix, without values: x -> B A x, not scaled."""

    def __init__(self, rank: int, num_inputs: int, num_outputs: int, like: torch.Tensor) -> None:
        super().__init__()
        kind = {"device": like.device, "dtype": like.dtype}
        self.lora_A = torch.nn.utils.skip_init(torch.nn.Linear, num_inputs, rank, bias=False, **kind)
        self.lora_B = torch.nn.utils.skip_init(torch.nn.Linear, rank, num_outputs, bias=False, **kind)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        low: torch.Tensor = self.lora_B(self.lora_A(x))
        return low


class Switch:
    """Whether the adapters of a model count; they share one."""

    def __init__(self) -> None:
        self.is_on = True

    @contextmanager
    def off(self) -> Iterator[None]:
        """Leave the adapters out within the block: the model is the one of its files."""
        self.is_on = False
        try:
            yield
        finally:
            self.is_on = True


class BaseReference:
    """The reference policy of a run with adapters: the policy without them. It takes no memory."""

    def __init__(self, policy: LearnerBackend) -> None:
        self._policy = policy

    def logprobs(self, batch: PackedBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return log-probs and entropies as `LearnerBackend.logprobs`."""
        with self._policy.without_adapters():
            return self._policy.logprobs(batch)

    def close(self) -> None:
        """Do nothing: the policy leaves the groups."""


def with_factors(read: ReadTensor, lora: LoraSection, seed: int) -> ReadTensor:
    """Return a function that reads a model's tensors with `read`, and gives factors their first values.

    Those are the ones of `lora.path`; else A is uniform over +-1/sqrt(inputs), as PEFT's, and B is zero, so
    that the model starts as that of its files.

    Raises:
        ConfigError: The adapter of `lora.path` cannot be read, or is another one; the function, if it lacks a
            factor.
    """
    stored = open_adapter(Path(lora.path), lora) if lora.path is not None else None

    def read_any(name: str) -> torch.Tensor:
        if not name.endswith((A, B)):
            return read(name)
        num_outputs, num_inputs = read(name.removesuffix(A).removesuffix(B) + WEIGHT).shape
        if stored is not None:
            shape = (lora.rank, num_inputs) if name.endswith(A) else (num_outputs, lora.rank)
            return read_factor(stored, name, shape)
        if name.endswith(B):
            return torch.zeros(num_outputs, lora.rank)
        generator = torch.Generator().manual_seed(xxhash.xxh64_intdigest(f"{seed} {name}".encode()) >> 1)
        bound = 1.0 / math.sqrt(num_inputs)
        return torch.empty(lora.rank, num_inputs).uniform_(-bound, bound, generator=generator)

    return read_any
