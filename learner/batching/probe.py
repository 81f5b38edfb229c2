"""The probe of a version: rows of tokens, and the learner's log-probs of them.

Owns the choice of the tokens. Every version brings a probe, as a replica may start at any step; each engine
decides which ones it checks. It computes the same log-probs and serves the version only if they have changed
as the learner's have. A version changes the embedding only where tokens were trained, so half of the rows are
drawn from the whole vocabulary and stay the same for the run, and half from the tokens of the last batch.
Invariant: the fixed rows depend on the vocabulary and the seed alone.

Shapes: T tokens of the probe, N packed positions.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from asyncrl.core.errors import ConfigError
from asyncrl.core.experience import Group, Trajectory
from asyncrl.core.staleness import Span
from learner.backend import LearnerBackend
from learner.batching.batch import PackedBatch, build_batch
from weight_sync.memory.manifest import Probe

ROW_TOKENS = 16
NUM_ROWS = 8
"""Fixed rows, and rows of trained tokens: 256 tokens in all, as long as one short answer each."""
SEEN_TOKENS = 4096
"""Of a batch that are looked through for ids."""


def choose_seen(tokens_N: torch.Tensor) -> list[int]:
    """Return ids that a batch holds, spread over the vocabulary: enough for the rows of trained tokens."""
    ids: list[int] = tokens_N[:SEEN_TOKENS].unique().tolist()
    return ids[:: max(1, -(-len(ids) // (NUM_ROWS * ROW_TOKENS)))]


class ProbeRows:
    """Builds the rows of a run's probes.

    Args:
        model: Folder of the model.
        seed: Of the run.
        max_tokens: A row may have so many and no more: what a microbatch has room for.

    Raises:
        ConfigError: The model's `config.json` names no size of its vocabulary.
    """

    def __init__(self, model: Path, seed: int, max_tokens: int = ROW_TOKENS) -> None:
        table = json.loads((model / "config.json").read_text())
        vocab_size = table.get("text_config", table).get("vocab_size")
        if not isinstance(vocab_size, int):
            raise ConfigError(
                f"{model / 'config.json'} names no vocab_size", hint="weight_sync.probe_every: 0"
            )
        self._seed, self._row_tokens = seed, max(2, min(max_tokens, ROW_TOKENS))
        self._fixed = self._draw(range(vocab_size))

    @property
    def row_tokens(self) -> int:
        return self._row_tokens

    def build(self, seen: Sequence[int] = ()) -> PackedBatch:
        """Return the fixed rows, and as many of the ids `seen`, if there are any."""
        drawn = [self._fixed, self._draw(seen)] if len(seen) else [self._fixed]
        rows = np.concatenate(drawn).reshape(-1, self._row_tokens)
        trajectories = [_as_group(index + 1, row) for index, row in enumerate(rows)]
        return build_batch(trajectories, 0, {1: 0})

    def _draw(self, ids: Sequence[int]) -> npt.NDArray[np.int32]:
        """Draw tokens for the rows; no id comes twice before all have come once."""
        wanted, source = NUM_ROWS * self._row_tokens, np.random.default_rng(self._seed)
        rounds = [source.permutation(ids)[:wanted] for _ in range(-(-wanted // len(ids)))]
        drawn: npt.NDArray[np.int32] = np.concatenate(rounds)[:wanted].astype(np.int32)
        return drawn


def measure_probe(policy: LearnerBackend, batch: PackedBatch, temperature: float, every: int) -> Probe:
    """Return the probe of the current weights. Collective: every rank hands in the same `batch`."""
    logprobs_N, _ = policy.logprobs(batch)
    row_tokens = batch.num_tokens // batch.num_rows
    kept_N = logprobs_N.view(batch.num_rows, row_tokens)[:, :-1].flatten()
    return Probe(tuple(batch.tokens_N.tolist()), tuple(kept_N.tolist()), row_tokens, temperature, every)


def _as_group(ticket: int, row_T: np.ndarray[tuple[int], np.dtype[np.int32]]) -> Group:
    response_ids = row_T[1:]
    trajectory = Trajectory(
        response_ids=response_ids,
        loss_mask=np.ones(len(response_ids), np.uint8),
        logprobs=np.zeros(len(response_ids), np.float32),
        spans=(Span(1, 0, len(response_ids)),),
        reward=0.0,
        finish_reason="length",
    )
    return Group(ticket, 1, row_T[:1], (trajectory,))
