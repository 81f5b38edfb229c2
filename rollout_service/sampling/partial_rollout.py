"""Continuation of answers that another replica began.

Owns how a beginning and what followed it become one answer. Invariant: tokens, log-probs and versions of
the beginning stay as they were recorded; nothing is sampled again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from asyncrl.core.experience import UNFINISHED, Trajectory
from asyncrl.core.experts import Rows, extend, no_rows, split
from asyncrl.core.staleness import Span
from rollout_service.engine.protocol import Completion, Sampling

NOTHING = Completion(np.empty(0, np.int32), np.empty(0, np.float32), (), "abort")
"""The beginning of an answer that starts from its prompt."""


def begin_from(partial: Trajectory | None, max_tokens: int, served: int) -> Completion:
    """Return the beginning that an answer of up to `max_tokens` may go on from at version `served`.

    A beginning that a newer version sampled is left alone: versions only rise within an answer.
    """
    if partial is None or partial.finish_reason != UNFINISHED or not 0 < partial.num_tokens < max_tokens:
        return NOTHING
    if partial.spans[-1].version > served:
        return NOTHING
    return Completion(partial.response_ids, partial.logprobs, partial.spans, "abort", partial.experts)


def continue_sampling(sampling: Sampling, num_begun: int) -> Sampling:
    """Return how the rest is sampled: what is left of the tokens, under a seed of its own.

    The first seed would draw for token `num_begun` what it drew for token 0.
    """
    if not num_begun:
        return sampling
    digest = hashlib.blake2b(f"continue/{sampling.seed}/{num_begun}".encode(), digest_size=8).digest()
    seed = int.from_bytes(digest, "little") >> 1
    return replace(sampling, max_tokens=sampling.max_tokens - num_begun, seed=seed)


def join(begun: Completion, rest: Completion) -> Completion:
    """Return both as one completion."""
    num_begun = len(begun.token_ids)
    if not num_begun:
        return rest
    spans = list(begun.spans)
    for span in rest.spans:
        end = span.end + num_begun
        if spans[-1].version == span.version:
            spans[-1] = Span(span.version, spans[-1].start, end)
        else:
            spans.append(Span(span.version, span.start + num_begun, end))
    return Completion(
        token_ids=np.concatenate([begun.token_ids, rest.token_ids]).astype(np.int32),
        logprobs=np.concatenate([begun.logprobs, rest.logprobs]).astype(np.float32),
        spans=tuple(spans),
        finish_reason=rest.finish_reason,
        experts=_join_experts(begun, rest),
    )


def _join_experts(begun: Completion, rest: Completion) -> Rows | None:
    """Return the rows of both. Another pass computed the beginning again: its rows are not those that sampled
    it, but for the last token, which no pass had read before.
    """
    num_begun, num_rest = len(begun.token_ids), len(rest.token_ids)
    if rest.experts is None:
        return extend(begun.experts, num_begun + num_rest, None)
    rows = rest.experts.copy()
    last = len(rows) - num_rest - 1
    rows[last + 1 - num_begun : last] = (
        no_rows(num_begun - 1, rows) if begun.experts is None else begun.experts[:-1]
    )
    return rows


def cut_at_stop(
    whole: Completion, num_begun: int, stop: Sequence[str], decode: Callable[[Sequence[int]], str]
) -> Completion:
    """Return `whole`, ended at a stop string across token `num_begun`: the engine saw the rest alone."""
    if not (num_begun and stop):
        return whole
    ids = whole.token_ids.tolist()
    begun_chars, longest = len(decode(ids[:num_begun])), max(len(text) for text in stop)
    for end in range(num_begun + 1, len(ids) + 1):
        text = decode(ids[:end])
        if any(one in text for one in stop):
            return _cut(whole, end)
        if len(text) - begun_chars >= longest:
            break
    return whole


def _cut(whole: Completion, end: int) -> Completion:
    spans = tuple(
        Span(span.version, span.start, min(span.end, end)) for span in whole.spans if span.start < end
    )
    first, _ = split(whole.experts, len(whole.token_ids) - end + 1)
    experts = None if first is None else extend(first, len(first) + 1, None)
    return Completion(whole.token_ids[:end], whole.logprobs[:end], spans, "stop", experts)


def as_unfinished(completion: Completion) -> Trajectory:
    """Return the beginning of an answer as a trajectory that a later attempt may go on from."""
    prompt_experts, experts = split(completion.experts, len(completion.token_ids))
    return Trajectory(
        response_ids=completion.token_ids,
        loss_mask=np.ones(len(completion.token_ids), dtype=np.uint8),
        logprobs=completion.logprobs,
        spans=completion.spans,
        reward=0.0,
        finish_reason=UNFINISHED,
        experts=experts,
        prompt_experts=prompt_experts,
    )
