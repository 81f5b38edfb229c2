"""The probe of a version: a fixed sequence, and what the learner's model says about it.

Owns the choice of the sequence. An engine that has loaded the version computes the same log-probs and
serves it only if they agree. Invariant: the sequence depends on the vocabulary and the seed alone.

Shapes: T tokens of the probe.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from asyncrl.errors import ConfigError
from asyncrl.experience import Group, Trajectory
from asyncrl.versions import Span
from learner.backend import LearnerBackend
from learner.batching.batch import PackedBatch, build_batch
from weight_sync.memory.manifest import Probe

NUM_TOKENS = 16
"""Enough to pass through every weight matrix; a longer one finds nothing more and costs a forward pass."""


def is_probe_due(step: int, published_step: int, every: int) -> bool:
    """Tell whether a multiple of `every` lies after the step published last; 0 is never, -1 nothing yet.

    >>> [step for step in range(0, 13, 4) if is_probe_due(step, step - 4 if step else -1, 5)]
    [0, 8, 12]
    """
    return every > 0 and (published_step < 0 or step // every > published_step // every)


def build_probe_batch(model: Path, seed: int, max_tokens: int = NUM_TOKENS) -> PackedBatch:
    """Return one row of tokens drawn at random from the vocabulary of the model in folder `model`.

    Args:
        max_tokens: A row may have so many and no more: what a microbatch has room for.

    Raises:
        ConfigError: The model's `config.json` names no size of its vocabulary.
    """
    table = json.loads((model / "config.json").read_text())
    vocab_size = table.get("text_config", table).get("vocab_size")
    if not isinstance(vocab_size, int):
        raise ConfigError(f"{model / 'config.json'} names no vocab_size", hint="weight_sync.probe_every: 0")
    tokens_T = (
        np.random.default_rng(seed).integers(0, vocab_size, min(max_tokens, NUM_TOKENS)).astype(np.int32)
    )
    response_ids = tokens_T[1:]
    trajectory = Trajectory(
        response_ids=response_ids,
        loss_mask=np.ones(len(response_ids), np.uint8),
        logprobs=np.zeros(len(response_ids), np.float32),
        spans=(Span(1, 0, len(response_ids)),),
        reward=0.0,
        finish_reason="length",
    )
    return build_batch([Group(1, 1, tokens_T[:1], (trajectory,))], 0, {1: 0})


def measure_probe(policy: LearnerBackend, batch: PackedBatch, temperature: float) -> Probe:
    """Return the probe of the current weights. Collective: every rank hands in the same `batch`."""
    logprobs_N, _ = policy.logprobs(batch)
    return Probe(tuple(batch.tokens_N.tolist()), tuple(logprobs_N[:-1].tolist()), temperature)
