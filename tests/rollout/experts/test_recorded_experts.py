"""Recorded experts on their way through episodes: answers, partial ones, turns, groups, records of turns."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from asyncrl.buffer.composition import group_bounds, max_group_bytes
from asyncrl.buffer.messages import LeaseGrant
from asyncrl.core.config.lengths import Lengths
from asyncrl.core.config.reading.problems import ConfigProblems
from asyncrl.core.errors import ConfigError
from asyncrl.core.experience import UNFINISHED, Group, decode_group, encode_group
from asyncrl.core.experts import Rows, has_row, no_rows
from asyncrl.core.staleness import PolicyVersion, Span
from asyncrl.planner.plan.derived import derive
from asyncrl.planner.plan.footprint.estimate import CHECKS
from asyncrl.planner.plan.footprint.memory import EXPERTS, count_parts
from asyncrl.planner.plan.models import check_router_losses, check_router_replay
from learner.batching.batch import build_batch
from rollout_service.engine.protocol import Completion, Interrupted, Sampling
from rollout_service.engine.scripted.engine import ScriptedEngine
from rollout_service.engine.vllm.engine import _engine_arguments, read_output
from rollout_service.engine.vllm.variant import settings_of
from rollout_service.environments import Environment, Step
from rollout_service.environments.registry import Episodes
from rollout_service.environments.runner import MultiTurn
from rollout_service.rewards.score import Answer, Score
from rollout_service.sampling import partial_rollout, turn_records
from rollout_service.sampling.episode import SingleTurn
from rollout_service.sampling.groups import GroupRunner, GroupSettings
from rollout_service.sampling.turn_journal import TurnJournal
from rollout_service.tasks.digit_sort.vocabulary import EOS, build_tokenizer
from tests.core.config.keys.test_engine_args import read
from tests.rollout.environments.parts import ExactMatch, make_prompt

LAYERS, CHOSEN = 2, 2
PROMPT = make_prompt("314=", tokenizer=build_tokenizer())
MIXTURE = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 48,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "vocab_size": 16,
}


def row_of(pass_number: int, position: int) -> list[list[int]]:
    """Return experts that tell which pass computed which position."""
    return [[pass_number, position], [position, pass_number]]


def rows_of(pass_number: int, first: int, end: int) -> Rows:
    return np.array([row_of(pass_number, n) for n in range(first, end)], np.uint8).reshape(-1, LAYERS, CHOSEN)


class RoutedScriptedEngine(ScriptedEngine):
    """Tells for each token the number of its request and its position; a prompt's first `num_cached` none."""

    def __init__(
        self, eos_id: int = EOS, num_cached: Sequence[int] = (0,), stops_at: int | None = None
    ) -> None:
        super().__init__(eos_id)
        self._serving = PolicyVersion(1, 0)
        self._num_cached, self._stops_at = num_cached, stops_at
        self.num_requests = 0

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, request_id: str) -> Completion:
        number, self.num_requests = self.num_requests, self.num_requests + 1
        whole = await super().generate(prompt_ids, sampling, request_id)
        completion = self._told(whole, len(prompt_ids), number)
        if self._stops_at is not None and number == 0:
            ids, spans = whole.token_ids[: self._stops_at], (Span(1, 0, self._stops_at),)
            begun = Completion(ids, whole.logprobs[: self._stops_at], spans, "abort")
            raise Interrupted("told to", completion=self._told(begun, len(prompt_ids), number))
        return completion

    def _told(self, completion: Completion, num_prompt: int, number: int) -> Completion:
        rows = rows_of(number, 0, num_prompt + len(completion.token_ids))
        cached = self._num_cached[min(number, len(self._num_cached) - 1)]
        rows[:cached], rows[-1] = 255, 255
        return dataclasses.replace(completion, experts=rows)


class ByLength:
    async def score(self, answer: Answer) -> Score:
        return Score(float(answer.num_tokens))


def runner_of(engine: ScriptedEngine, group_size: int = 3, **settings: Any) -> GroupRunner:
    episodes = SingleTurn(engine, build_tokenizer(), ByLength())
    prompts: Any = SimpleNamespace(at=lambda index: PROMPT)
    return GroupRunner(episodes, prompts, GroupSettings(0, group_size, 1.0, 6, Lengths(0.0, 6.0), **settings))


async def run(runner: GroupRunner, engine: ScriptedEngine, partial: Group | None = None) -> Group:
    await engine.start()
    grant = LeaseGrant(1, 1, 0, 0, 0, 0, 1.0)
    return await runner.run(grant, partial)


def firsts(rows: Rows | None) -> list[int]:
    """Return the pass that computed each row, 255 for none."""
    assert rows is not None
    return rows[:, 0, 0].tolist()


def test_a_group_has_the_prompt_s_rows_once_from_whichever_sample_computed_them():
    num_prompt = len(PROMPT.token_ids)
    engine = RoutedScriptedEngine(num_cached=(2, num_prompt - 1, 1))
    group = asyncio.run(run(runner_of(engine), engine))
    assert firsts(group.prompt_experts) == [255, 2, *[0] * (num_prompt - 2)]
    for number, one in enumerate(group.trajectories):
        assert firsts(one.experts) == [number] * (one.num_tokens - 1) + [255]
        assert one.prompt_experts is None
    found = decode_group(encode_group(group)).prompt_experts
    assert found is not None and group.prompt_experts is not None
    assert found.tolist() == np.sort(group.prompt_experts, -1).tolist()


def test_a_greedy_sample_s_rows_of_the_prompt_count_too():
    engine = RoutedScriptedEngine(num_cached=(4, 4, 4, 0))
    group = asyncio.run(run(runner_of(engine, has_greedy=True), engine))
    assert firsts(group.prompt_experts)[:4] == [3] * 4


def test_a_continued_answer_keeps_the_rows_of_its_beginning():
    """The last token of the beginning was read by nobody: its row is of the pass that went on."""
    num_prompt = len(PROMPT.token_ids)
    engine = RoutedScriptedEngine(num_cached=(1, 0), stops_at=3)
    runner = runner_of(engine, group_size=1)
    partial = asyncio.run(run(runner, engine))
    assert partial.trajectories[0].finish_reason == UNFINISHED
    assert firsts(partial.trajectories[0].experts) == [0, 0, 255]
    partial = decode_group(encode_group(partial))
    group = asyncio.run(run(runner, engine, partial))
    assert firsts(group.trajectories[0].experts) == [0, 0, 1, 1, 1, 255]
    assert firsts(group.prompt_experts) == [1, *[0] * (num_prompt - 1)]


@pytest.mark.parametrize("has_rest", [True, False])
def test_a_beginning_and_a_rest_of_which_one_has_no_rows(has_rest: bool):
    begun = Completion(np.arange(2, dtype=np.int32), np.zeros(2, np.float32), (Span(1, 0, 2),), "abort")
    rest = Completion(np.arange(3, dtype=np.int32), np.zeros(3, np.float32), (Span(1, 0, 3),), "stop")
    if has_rest:
        rest = dataclasses.replace(rest, experts=rows_of(9, 0, 4 + 2 + 3))
        assert firsts(partial_rollout.join(begun, rest).experts) == [9] * 4 + [255, 9] + [9] * 3
    else:
        begun = dataclasses.replace(begun, experts=rows_of(8, 0, 2))
        assert firsts(partial_rollout.join(begun, rest).experts) == [8, 8, 255, 255, 255]


def test_an_answer_that_is_cut_at_a_stop_string_ends_with_a_token_without_a_row():
    whole = Completion(
        np.array([1, 2, 3, 4, 5], np.int32),
        np.zeros(5, np.float32),
        (Span(1, 0, 5),),
        "length",
        rows_of(0, 0, 9),
    )
    found = partial_rollout.cut_at_stop(whole, 2, ("23",), lambda ids: "".join(map(str, ids)))
    assert found.token_ids.tolist() == [1, 2, 3]
    assert firsts(found.experts) == [0] * 6 + [255]


class Again(Environment):
    """Says `7=` after each of three turns."""

    def __init__(self, prompt: object, seed: int) -> None:
        self._left = 3

    async def step(self, answer: str) -> Step:
        self._left -= 1
        return Step("7=", is_done=self._left == 0)


def episode(engine: ScriptedEngine, journal: TurnJournal | None = None) -> Any:
    runner = MultiTurn(engine, build_tokenizer(), Episodes(Again), ExactMatch(), has_chats=False)  # type: ignore[arg-type]
    record = None if journal is None else journal.episode(0)

    async def play() -> Any:
        await engine.start()
        return await runner.run(PROMPT, Sampling(1.0, 60, 5), "1.1.0", record)

    return asyncio.run(play())


def test_turns_have_the_rows_of_the_request_that_first_read_each_token():
    """An observation is read by the request of the next turn, and so is the last token before it."""
    num_prompt = len(PROMPT.token_ids)
    engine = RoutedScriptedEngine(EOS, num_cached=(1, num_prompt))
    found = episode(engine)
    assert engine.num_requests == 3
    assert firsts(found.prompt_experts) == [255, *[0] * (num_prompt - 1)]
    turn, wanted = 0, []
    for place, is_said in enumerate(found.loss_mask):
        is_last_said = is_said and (place + 1 == len(found.loss_mask) or not found.loss_mask[place + 1])
        turn += bool(is_last_said)
        wanted.append(turn)
    assert firsts(found.experts) == [*wanted[:-1], 255]
    assert found.experts[:-1, 0, 1].tolist() == list(range(num_prompt, num_prompt + len(wanted) - 1))


def test_recorded_turns_keep_their_rows_for_the_attempt_after():
    sent: list[bytes] = []

    async def send(number: int, versions: tuple[int, int], record: bytes) -> str:
        sent.append(record)
        return "stored"

    first = episode(RoutedScriptedEngine(EOS), TurnJournal(1, 1, send))
    engine = RoutedScriptedEngine(EOS)
    again = episode(engine, TurnJournal(1, 2, send, sent))
    assert engine.num_requests == 0, "all turns were recorded"
    assert np.sort(again.experts, -1).tolist() == np.sort(first.experts, -1).tolist()
    assert np.sort(again.prompt_experts, -1).tolist() == np.sort(first.prompt_experts, -1).tolist()
    said = [e for e in turn_records.decode(sent) if isinstance(e, turn_records.Routed)]
    assert sum(one.num_tokens for one in said) == len(PROMPT.token_ids) + len(first.experts) + len(said) - 1


def test_a_record_of_turns_without_experts_has_no_entry_of_them():
    sent: list[bytes] = []

    async def send(number: int, versions: tuple[int, int], record: bytes) -> str:
        sent.append(record)
        return "stored"

    found = episode(ScriptedEngine(EOS), TurnJournal(1, 1, send))
    assert found.experts is None and found.prompt_experts is None
    assert not any(isinstance(entry, turn_records.Routed) for entry in turn_records.decode(sent))


@pytest.mark.parametrize(
    ("num_tokens", "form"), [(9, (2, 2, 1, 0)), (4, (2, 2, 1, 1)), (4, (0, 2, 1, 0)), (0, (2, 2, 1, 0))]
)
def test_a_record_whose_experts_do_not_fit_is_refused(num_tokens: int, form: tuple[int, int, int, int]):
    completion = Completion(np.arange(4, dtype=np.int32), np.zeros(4, np.float32), (Span(1, 0, 4),), "stop")
    said = turn_records.said(0, 0, 1, completion, "")
    bad = turn_records.Routed(0, 0, num_tokens, form, bytes(16))
    record = turn_records.join([turn_records.encode(said), turn_records.encode(bad)])
    journal = TurnJournal(1, 2, None, [record])
    assert journal.episode(0).turns == [], "the episode begins anew"


def test_a_batch_has_the_rows_at_the_positions_of_their_tokens():
    engine = RoutedScriptedEngine(num_cached=(1, 1))
    group = asyncio.run(run(runner_of(engine, group_size=2), engine))
    bare = dataclasses.replace(
        group,
        ticket=2,
        prompt_experts=None,
        trajectories=tuple(dataclasses.replace(one, experts=None) for one in group.trajectories),
    )
    batch = build_batch([group, bare], 0, {1: 0})
    found, num_prompt = batch.experts_N, len(PROMPT.token_ids)
    assert found is not None and found.shape == (batch.num_tokens, LAYERS, CHOSEN)
    for row in range(4):
        mine = found[batch.cu_seqlens[row] : batch.cu_seqlens[row + 1]]
        one = group.trajectories[row % 2]
        if row >= 2:
            assert (mine == -1).all()
            continue
        assert mine[:, 0, 0].tolist() == [-1, *[0] * (num_prompt - 1), *[row] * (one.num_tokens - 1), -1]
        assert mine[1:-1, 0, 1].tolist() == list(range(1, num_prompt + one.num_tokens - 1))
    assert build_batch([bare], 0, {1: 0}).experts_N is None


# --- what a configuration says of it -------------------------------------------------------------


def write_model(folder: Path, **changes: Any) -> str:
    (folder / "config.json").write_text(json.dumps(MIXTURE | changes))
    return f"model.path={folder}"


def test_a_run_s_groups_and_bounds_have_room_for_experts(tmp_path: Path):
    path = write_model(tmp_path)
    off, on = (read(tmp_path, "{}", path, f"rollout.router_replay={how}") for how in ("off", "r3"))
    tokens = on.data.max_prompt_tokens + on.rollout.group_size * on.rollout.max_tokens
    assert max_group_bytes(on) - max_group_bytes(off) == 384 * tokens
    assert group_bounds(on).experts == (48, 8, 128)
    assert group_bounds(off).experts is None


def test_a_gpu_s_engine_is_asked_for_experts_by_vllm_s_name_and_a_cpu_s_has_our_classes(tmp_path: Path):
    from vllm.engine.arg_utils import AsyncEngineArgs

    path = write_model(tmp_path)

    def arguments(*more: str) -> dict[str, object]:
        return _engine_arguments(settings_of(read(tmp_path, "{}", path, *more)))

    on_gpu = arguments("rollout.router_replay=r3", "rollout.gpus=1")
    assert on_gpu["enable_return_routed_experts"] is True and on_gpu["enable_prefix_caching"] is True
    assert {"enable_return_routed_experts", "worker_cls", "scheduler_cls"} <= {
        field.name for field in dataclasses.fields(AsyncEngineArgs)
    }
    on_cpu = arguments("rollout.router_replay=r3")
    assert (
        str(on_cpu["worker_cls"]).endswith(".RoutedWorker") and "enable_return_routed_experts" not in on_cpu
    )
    for plain in (arguments(), arguments("rollout.gpus=1")):
        assert not plain.keys() & {"enable_return_routed_experts", "worker_cls", "scheduler_cls"}


def test_a_dense_model_s_engine_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="needs a mixture of experts"):
        settings_of(read(tmp_path, "{}", write_model(tmp_path, num_experts=0), "rollout.router_replay=r3"))


@pytest.mark.parametrize(("num_experts", "dtype"), [(0, None), (128, np.uint8), (256, np.uint16)])
def test_vllm_s_rows_of_256_experts_are_widened(num_experts: int, dtype: Any):
    """It tells them in a byte each: there 255 is an expert."""
    told = np.full((5, LAYERS, CHOSEN), 255 if num_experts == 256 else 7, np.uint8)
    completion = SimpleNamespace(
        token_ids=[1, 2],
        logprobs=SimpleNamespace(logprobs=[0.0, 0.0]),
        weight_versions=[SimpleNamespace(version="1", start=0, end=2)],
        finish_reason="stop",
        routed_experts=told,
    )
    output: Any = SimpleNamespace(outputs=[completion], request_id="one")
    found = read_output(output, num_experts).experts
    assert dtype is None if found is None else found.dtype == dtype
    if found is not None:
        assert has_row(found).tolist() == [True] * 5 + [False]
        assert found[-1:].tolist() == no_rows(1, found).tolist()


@pytest.mark.parametrize(
    ("overrides", "what"),
    [
        (
            ("rollout.engine=sglang",),
            "rollout.engine does nothing for rollout.router_replay: SGLang does not say",
        ),
        (("rollout.engine=[vllm, scripted]",), "the scripted engine does not say which experts it chose"),
        (("rollout.gpus=1", "rollout.prefix_caching=false"), "rollout.prefix_caching does nothing for"),
        (("learner.backend=fsdp2", "learner.compile=true"), "learner.compile does nothing for"),
        (("rollout.engine_args={enable_return_routed_experts: true}",), "it is rollout.router_replay"),
    ],
)
def test_what_records_no_experts_is_refused(tmp_path: Path, overrides: tuple[str, ...], what: str):
    path = write_model(tmp_path)
    with pytest.raises(ConfigProblems) as caught:
        read(tmp_path, "{}", path, "rollout.router_replay=r3", *overrides)
    (problem,) = caught.value.problems
    assert what in f"{problem.what} {problem.hint}"
    if "engine_args" not in overrides[0]:
        assert read(tmp_path, "{}", path, *overrides).rollout.router_replay == "off"


@pytest.mark.parametrize(
    ("experts", "overrides", "what"),
    [
        (128, (), ""),
        (128, ("rollout.gpus=1",), ""),
        (0, (), "needs a mixture of experts"),
        (128, ("rollout.gpus=1", "staleness.max_lag=0"), "needs rollout.prefix_caching on GPUs"),
        (128, ("staleness.max_lag=0",), ""),
    ],
)
def test_plan_says_why_no_experts_can_be_recorded(
    tmp_path: Path, experts: int, overrides: tuple[str, ...], what: str
):
    path = write_model(tmp_path, num_experts=experts)
    (found,) = list(
        check_router_replay(read(tmp_path, "{}", path, "rollout.router_replay=r3", *overrides))
    ) or [""]
    assert what in found and bool(what) == bool(found)
    assert not list(check_router_replay(read(tmp_path, "{}", path, *overrides)))


@pytest.mark.parametrize("key", ["learner.router_aux_loss", "learner.router_z_loss"])
def test_plan_refuses_losses_of_routers_that_are_not_there_or_not_known(tmp_path: Path, key: str):
    assert check_router_losses in CHECKS
    for experts, kind, is_fine in (
        (128, "qwen3_moe", True),
        (0, "qwen3_moe", False),
        (128, "qwen2_moe", False),
    ):
        path = write_model(tmp_path, num_experts=experts, model_type=kind)
        found = list(check_router_losses(read(tmp_path, "{}", path, f"{key}=0.1")))
        assert (found == []) == is_fine
        assert is_fine or "the model has no experts, or how their router scores them" in found[0]
        assert not list(check_router_losses(read(tmp_path, "{}", path)))


def test_plan_counts_the_experts_of_a_step(tmp_path: Path):
    path = write_model(tmp_path)
    on = read(tmp_path, "{}", path, "rollout.router_replay=r3", "learner.dp=2")
    off = read(tmp_path, "{}", path, "learner.dp=2")
    parts = {part.what: part for part in count_parts(on, 10**6, 1)}
    rows = on.learner.groups_per_step * on.rollout.group_size
    tokens = rows * (on.data.max_prompt_tokens + on.rollout.max_tokens)
    assert parts[EXPERTS].num_bytes == (1 + 2) * 384 * tokens, "both ranks together have the batch once"
    assert EXPERTS not in {part.what for part in count_parts(off, 10**6, 1)}
    assert [one.value for one in derive(on) if one.name == "bytes of a token's experts"] == [384]
