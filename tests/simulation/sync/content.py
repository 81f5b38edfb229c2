"""Weights of a simulated learner: each version number that was tried has bytes of its own.

Invariant: a number stands for one content, for ever; two numbers never have the same.
"""

from __future__ import annotations

import random

import numpy as np
import torch

from asyncrl.core.errors import FencedError

SHAPES = {"embedding": (40, 16), "norm": (33,), "head": (17, 24)}
DTYPES = {"embedding": torch.float32, "norm": torch.bfloat16, "head": torch.float32}
BUCKET_BYTES = 1024
SPARSE_SHARE = 0.03


class Truth:
    """The content that each number stands for, and the token that may draw the next one.

    Args:
        is_sparse: A version differs in few elements from the one before it.

    Attributes:
        tokens: By number, the learner's fencing token that drew it.
        published: The newest number that a publisher has taken.
    """

    def __init__(self, seed: str, *, is_sparse: bool) -> None:
        self._is_sparse = is_sparse
        self._source = np.random.default_rng(random.Random(f"content/{seed}").getrandbits(64))
        self._newest = {name: self._draw(shape) for name, shape in SHAPES.items()}
        self._bytes: dict[int, dict[str, bytes]] = {}
        self.tokens: dict[int, int] = {}
        self.token = self.published = self.number = 0

    def open(self) -> int:
        """Return a fencing token for a learner: older ones get no number any more."""
        self.token += 1
        return self.token

    def draw(self, token: int) -> tuple[int, list[tuple[str, torch.Tensor]]]:
        """Return the next number and its tensors.

        Raises:
            FencedError: A newer token was opened.
        """
        if token < self.token:
            raise FencedError(f"the fencing token {token} is older than {self.token}")
        self.number += 1
        return self.number, self.make(self.number, token)

    def make(self, number: int, token: int) -> list[tuple[str, torch.Tensor]]:
        """Return the tensors that a number stands for from now on."""
        self.tokens[number] = token
        for name, values in self._newest.items():
            self._newest[name] = self._change(values)
        tensors = [
            (name, torch.from_numpy(values.copy()).to(DTYPES[name]).view(SHAPES[name]))
            for name, values in self._newest.items()
        ]
        self._bytes[number] = {name: bytes_of(tensor) for name, tensor in tensors}
        return tensors

    def _draw(self, shape: tuple[int, ...]) -> np.ndarray:  # type: ignore[type-arg]
        return self._source.random(int(np.prod(shape)), dtype=np.float32)

    def _change(self, values: np.ndarray) -> np.ndarray:  # type: ignore[type-arg]
        if not self._is_sparse:
            return self._source.random(len(values), dtype=np.float32)
        changed = values.copy()
        num = max(1, int(len(values) * SPARSE_SHARE))
        changed[self._source.integers(0, len(values), num)] += (
            self._source.random(num, dtype=np.float32) + 1.0
        )
        return changed

    def is_right(self, number: int, found: dict[str, bytes]) -> bool:
        """Tell whether these are the bytes of that number."""
        return self._bytes.get(number) == found

    def name_of(self, found: dict[str, bytes]) -> str:
        """Return which number these bytes are of, tensor by tensor."""
        names = []
        for name, data in found.items():
            of = [number for number, known in self._bytes.items() if known[name] == data]
            names.append(f"{name} of {of[0] if of else 'nothing'}")
        return ", ".join(names)


def zeros() -> list[tuple[str, torch.Tensor]]:
    """Return tensors of the names, shapes and dtypes of all versions."""
    return [(name, torch.zeros(shape, dtype=DTYPES[name])) for name, shape in SHAPES.items()]


def bytes_of(tensor: torch.Tensor) -> bytes:
    """Return a tensor's bytes."""
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
