"""Rollouts on the page, cut to a length; token ids as text, also for `asyncrl inspect rollouts`.

A model's text is passed on with its control characters written out; the page never makes markup of it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from asyncrl.core.experience import Group, Trajectory
from asyncrl.core.files.printable import printable
from asyncrl.page.figures import DASH, count_of, figure_of

Decode = Callable[[Sequence[int]], str]


def decoder_of(model: Path, warn: Callable[[str], None]) -> Decode:
    """Return what turns token ids into text; ids in angle brackets where no tokenizer can be read.

    It reads `tokenizer.json` itself: transformers takes seconds to import and half a gigabyte of memory.
    """
    from tokenizers import Tokenizer

    path = model / "tokenizer.json"
    if not path.exists():
        warn(f"token ids are shown: {path} is not there")
        return _show_ids
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises no class of its own; the file may be newer than it
        warn(f"token ids are shown: {path} cannot be read: {error}")
        return _show_ids
    return lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False))


def _show_ids(ids: Sequence[int]) -> str:
    return "".join(f"<{number}>" for number in ids)


MAX_ANSWERS = 2
HEAD_TOKENS, TAIL_TOKENS = 300, 100
"""Of a prompt or an answer that are shown."""


def rollouts_of(groups: Sequence[Group], decode: Callable[[Sequence[int]], str]) -> list[dict[str, object]]:
    """Return the page's picture of some groups: the prompt, and the best and the worst of the answers."""
    return [
        {
            "ticket": group.ticket,
            "attempt": group.attempt,
            "prompt": text_of(group.prompt_ids.tolist(), decode),
            "reward_mean": figure_of(statistics.fmean(group.episode_rewards)),
            "num_answers": len(group.episode_rewards),
            "rewards": [round(reward, 4) for reward in group.episode_rewards],
            "answers": [_answer(one, decode) for one in _best_and_worst(group)],
        }
        for group in groups
    ]


def _best_and_worst(group: Group) -> list[Trajectory]:
    ordered = sorted(group.trajectories, key=lambda one: -one.reward)
    return ordered if len(ordered) <= MAX_ANSWERS else [*ordered[: MAX_ANSWERS - 1], ordered[-1]]


def _answer(one: Trajectory, decode: Callable[[Sequence[int]], str]) -> dict[str, object]:
    versions = sorted({span.version for span in one.spans})
    return {
        "text": text_of(one.response_ids.tolist(), decode),
        "reward": figure_of(one.reward),
        "tone": "good" if one.reward > 0 else "bad" if one.reward < 0 else "none",
        "finish": printable(one.finish_reason),
        "num_tokens": count_of(one.num_tokens),
        "versions": DASH.join(str(version) for version in versions[:1] + versions[1:][-1:]) or DASH,
    }


def text_of(ids: Sequence[int], decode: Callable[[Sequence[int]], str]) -> str:
    """Return the text of some tokens, without the middle of what is long."""
    if len(ids) <= HEAD_TOKENS + TAIL_TOKENS:
        return printable(decode(ids))
    return printable(f"{decode(ids[:HEAD_TOKENS])} […] {decode(ids[-TAIL_TOKENS:])}")
