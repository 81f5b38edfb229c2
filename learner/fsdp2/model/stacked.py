"""Names of a checkpoint for the parameters of a module of transformers, which stacks a layer's experts.

A stacked parameter [E, ...] holds one matrix of each expert, or two above each other; a checkpoint has each
by itself. Invariant: views, never copies, so that what is named here is what the optimizer updates.

Shapes: E experts, n of them on a rank, F channels of one, H hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from transformers import PreTrainedConfig

from asyncrl.models.architectures import FAMILIES, ExpertNames
from learner.checkpoint.pretrained import PretrainedTensors

_EXPERTS = ".experts."


@dataclass(frozen=True)
class NamedRows:
    """Rows from `start` on of the tensor `name`, whose whole shape is `shape`."""

    name: str
    shape: tuple[int, ...]
    start: int
    values: torch.Tensor


@dataclass(frozen=True)
class StoredNames:
    """Names of one family; None keeps the module's."""

    experts: ExpertNames | None = None

    @staticmethod
    def of(config: PreTrainedConfig) -> StoredNames:
        """Return those of a model; families that nobody listed are named as most are."""
        family = FAMILIES.get(config.model_type)
        return StoredNames(family.experts if family is not None and family.experts else ExpertNames())

    def split(self, name: str, rows: torch.Tensor, start: int, shape: tuple[int, ...]) -> Iterator[NamedRows]:
        """Yield the tensors of a checkpoint that `rows` from `start` on of the parameter `name` are of."""
        tensors = self._of_expert(name)
        if not tensors:
            yield NamedRows(self._of_block(name), shape, start, rows)
            return
        for index, expert in enumerate(rows, start):
            for tensor, part in zip(tensors, expert.chunk(len(tensors)), strict=True):
                yield NamedRows(tensor.format(index), tuple(part.shape), 0, part)

    def read(
        self, tensors: PretrainedTensors, name: str, target: torch.Tensor, start: int | None = None
    ) -> torch.Tensor:
        """Return what is stored of the parameter `name`: all, or the rows of `target` from `start` on.

        Raises:
            ConfigError: A tensor is not there.
        """
        of_expert = self._of_expert(name)
        if not of_expert:
            stored = tensors.read(self._of_block(name))
            return stored if start is None else stored[start : start + len(target)]
        indices = range(start or 0, (start or 0) + len(target))
        experts = [torch.cat([tensors.read(one.format(index)) for one in of_expert]) for index in indices]
        return torch.stack(experts) if experts else torch.empty_like(target)

    def _of_block(self, name: str) -> str:
        return name.replace(".mlp.", f".{self.experts.block}.") if self.experts is not None else name

    def _of_expert(self, name: str) -> tuple[str, ...]:
        """Return the names of an expert's tensors in a stacked parameter, top first; none of another one."""
        head, _, kind = self._of_block(name).partition(_EXPERTS)
        if self.experts is None or kind not in ("gate_up_proj", "down_proj"):
            return ()
        parts = (self.experts.gate, self.experts.up) if kind == "gate_up_proj" else (self.experts.down,)
        return tuple(f"{head}{_EXPERTS}{{}}.{part}.weight" for part in parts)
