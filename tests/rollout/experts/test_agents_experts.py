"""Recorded experts of agents: over the gateway, through turns, branches, swaps, and into the group."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from asyncrl.core.experience import Group, Trajectory, decode_group, encode_group
from asyncrl.core.experts import Rows, has_row
from asyncrl.core.staleness import Span
from rollout_service.gateway.conversation.history import asked_in_chat
from rollout_service.gateway.conversation.transcript import Transcript, Turn
from rollout_service.gateway.sessions import OpenGroup
from tests.rollout.experts.test_recorded_experts import firsts, rows_of
from tests.rollout.experts.test_routed import MAX_TIED, routes_of
from tests.rollout.gateway.gateway_parts import (
    QUESTION,
    Agent,
    Served,
    Stage,
    make_text_folder,
    open_gateway_stage,
)
from tests.rollout.gateway.test_gateway_rules import GRANT, RULES
from tests.rollout.replica.flight_parts import TIE

NUM_EXPERTS, BLOCK = 4, 128
HELLO, MORE, OTHER = (
    {"role": "user", "content": content} for content in (QUESTION, "Und sonst?", "Wie ist das Wetter?")
)


# A transcript


def turn_of(number: int, *prompt_ids: int, answer: tuple[int, ...] = (7, 8), cached: int = 0) -> Turn:
    """Return a turn whose rows tell its number; of its prompt the first `cached` have none."""
    rows = rows_of(number, 0, len(prompt_ids) + len(answer))
    rows[:cached], rows[-1] = 255, 255
    spans, logprobs = (Span(1, 0, len(answer)),), (-0.5,) * len(answer)
    return Turn(prompt_ids, answer, logprobs, spans, "stop", "said", experts=rows)


def rows_in(trajectory: Trajectory) -> list[int]:
    assert trajectory.prompt_experts is not None and trajectory.experts is not None
    return firsts(np.concatenate([trajectory.prompt_experts, trajectory.experts]))


def test_each_token_keeps_the_row_of_the_first_call_that_read_it():
    transcript = Transcript()
    transcript.add(turn_of(0, 1, 2, 3))
    transcript.add(turn_of(1, 1, 2, 3, 7, 8, 4))
    assert rows_in(transcript.trajectory(2, 1.0)) == [0, 0, 0, 0, 1, 1, 1, 255]


def test_what_the_first_call_found_in_the_cache_has_the_row_of_a_later_one():
    transcript = Transcript()
    transcript.add(turn_of(0, 1, 2, 3, cached=2))
    transcript.add(turn_of(1, 1, 2, 3, 7, 8, 4, cached=1))
    assert rows_in(transcript.trajectory(3, 1.0)) == [255, 1, 0, 0, 1, 1, 1, 255]


def test_a_branch_has_the_rows_of_what_it_shares():
    transcript = Transcript()
    transcript.add(turn_of(0, 1, 2, 3))
    transcript.add(turn_of(1, 1, 2, 3, 7, 8, 4))
    branch = transcript.share(1)
    branch.add(turn_of(2, 1, 2, 3, 7, 8, 5, 6, cached=3))
    assert rows_in(branch.trajectory(3, 1.0)) == [0, 0, 0, 0, 1, 2, 2, 2, 255]
    assert rows_in(transcript.trajectory(3, 1.0)) == [0, 0, 0, 0, 1, 1, 1, 255]


def test_an_answer_that_is_sampled_again_has_rows_of_its_own():
    transcript = Transcript()
    transcript.add(turn_of(0, 1, 2, 3, answer=(7, 8, 9)))
    transcript.replace_last(turn_of(1, 1, 2, 3))
    assert rows_in(transcript.trajectory(3, 1.0)) == [0, 0, 0, 1, 255]


def test_without_recorded_experts_there_are_none():
    transcript = Transcript()
    transcript.add(Turn((1, 2), (3,), (-0.5,), (Span(1, 0, 1),), "stop", "c"))
    found = transcript.trajectory(2, 1.0)
    assert found.experts is None and found.prompt_experts is None


def test_a_group_has_the_prompt_s_rows_once_from_whichever_session_computed_them():
    async def assemble() -> Group:
        prompt: Any = None
        group = OpenGroup(GRANT, prompt, 2, 1e9)
        for number, cached in enumerate((2, 1)):
            call = group.open(max_branches=1).begin()
            call.ask(asked_in_chat([HELLO], {}))
            call.record(turn_of(number, 1, 2, 3, 4 + number, cached=cached))
        return group.assemble(RULES)

    whole = asyncio.run(assemble())
    assert firsts(whole.prompt_experts) == [255, 1, 0]
    assert [firsts(one.experts) for one in whole.trajectories] == [[0, 0, 255], [1, 1, 255]]
    assert all(one.prompt_experts is None for one in whole.trajectories)


# The real engine


def make_mixture_folder(folder: Path) -> Path:
    """Return the text model's folder as one of a mixture of experts."""
    model_folder = make_text_folder(folder)
    config = json.loads((model_folder / "config.json").read_text())
    experts = {"num_experts": NUM_EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    told = {**config, **experts, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}
    (model_folder / "config.json").write_text(json.dumps(told))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_folder))
    model.save_pretrained(model_folder)
    return model_folder


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    served = Served(make_folder=make_mixture_folder, num_experts=NUM_EXPERTS)
    with open_gateway_stage(tmp_path_factory.mktemp("stage"), served=served) as opened:
        yield opened


def open_two(stage: Stage) -> tuple[Agent, Agent]:
    return stage.open(), stage.open()


def said(answer: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": answer.choices[0].message.content}


def stream(agent: Agent, *messages: Any, **more: Any) -> dict[str, Any]:
    chunks = agent.chat(*messages, stream=True, **more)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    return {"role": "assistant", "content": text}


def rows_with_ids(group: Group, trajectory: Trajectory) -> tuple[list[int], Rows]:
    """Return all ids of a trajectory, and their rows as the learner gets them."""
    assert group.prompt_experts is not None and trajectory.experts is not None
    ids = [*group.prompt_ids.tolist(), *trajectory.response_ids.tolist()]
    return ids, np.concatenate([group.prompt_experts, trajectory.experts])


def check(rows: Rows, model: Any, ids: list[int], start: int, end: int) -> tuple[int, int]:
    """Check rows from `start` to `end` against Hugging Face; return how many were compared, and tied."""
    chosen, gaps = routes_of(model, ids[:end])
    found = torch.from_numpy(np.sort(rows[start:end].astype(np.int64), -1))
    is_other = (found != chosen[start:end]).any(-1)
    assert (gaps[start:end][is_other] < TIE).all()
    return is_other.numel(), int(is_other.sum())


def take(stage: Stage, *agents: Agent) -> Group:
    for agent in agents:
        assert agent.reward().status_code == 200
    return stage.take_group()


def test_all_turns_and_branches_have_the_experts_that_hugging_face_chooses(stage: Stage):
    """One agent's second prompt finds its first block in the cache: the rows are those of the first call."""
    number = stage.serve(11, ends=False)
    one, other = open_two(stage)
    first = said(one.chat(HELLO, max_tokens=2 * BLOCK))
    second = stream(one, HELLO, first, MORE)
    one.chat(HELLO, first, MORE, second, OTHER)
    stream(other, HELLO)
    other.chat(OTHER)
    group = take(stage, one, other)
    assert group.samples == (0, 1, 1)
    pairs = tied = 0
    for trajectory in group.trajectories:
        ids, rows = rows_with_ids(group, trajectory)
        assert has_row(rows).tolist() == [True] * (len(ids) - 1) + [False]
        found = check(rows, stage.models[number], ids, 0, len(ids) - 1)
        pairs, tied = pairs + found[0], tied + found[1]
    assert pairs > 600 and tied <= MAX_TIED * pairs
    sent = decode_group(encode_group(group))
    assert sent.prompt_experts is not None and group.prompt_experts is not None
    assert sent.prompt_experts.tolist() == np.sort(group.prompt_experts, -1).tolist()


def test_a_turn_after_a_swap_has_rows_of_its_own_tokens_alone(stage: Stage):
    """The new weights compute the whole conversation, whose earlier tokens keep the rows of their passes."""
    before = stage.serve(12)
    one, other = open_two(stage)
    first = said(one.chat(HELLO))
    other.chat(HELLO)
    after = stage.serve(13)
    one.chat(HELLO, first, MORE)
    group = take(stage, one, other)
    (ids, rows), spans = rows_with_ids(group, group.trajectories[0]), group.trajectories[0].spans
    assert [span.version for span in spans] == [before, after]
    last = int(np.flatnonzero(np.diff(group.trajectories[0].loss_mask.astype(int)) < 0)[0])
    first_unread = len(group.prompt_ids) + last
    check(rows, stage.models[before], ids, 0, first_unread)
    check(rows, stage.models[after], ids, first_unread, len(ids) - 1)
    old, _ = routes_of(stage.models[after], ids)
    is_same = (torch.from_numpy(np.sort(rows[:first_unread].astype(np.int64), -1)) == old[:first_unread]).all(
        -1
    )
    assert not is_same.all(), "the new weights choose others, or this shows nothing"
