"""A step on groups as they finish gives the update of the whole batch, on both backends."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file

from asyncrl.core.config.rules.streaming import BATCH_WIDE, BY_ROWS, PICKS_TOKENS, find_stream_conflicts
from asyncrl.core.config.tree import Config, KlSection
from asyncrl.core.metrics import unknown_names
from learner.algorithms.advantage import ADVANTAGES
from learner.algorithms.losses import POLICY_LOSSES
from learner.backend import Models
from learner.batching.batch import build_batch
from learner.batching.parts import join_batches, make_empty
from learner.guard.guard import UnstableTraining
from learner.guard.memory import GuardedModel
from learner.orders import Train, decode_order, encode_order, join_parts, split_parts
from learner.report import Stopwatch, reduce_over_ranks
from learner.step import train_step
from learner.stream import UNDIVIDED, StreamedStep
from tests.different import assert_all_differ
from tests.learner.parts.contract import is_bit_equal, weights_of
from tests.learner.parts.launching import run_ranks
from tests.learner.parts.samples import make_groups
from tests.learner.parts.training import StoredGroups, open_backend, open_fsdp2, open_objective

MAX_PROMPT = 6
GROUPS = [dataclasses.replace(one, baseline_reward=0.5) for one in make_groups(6, versions=(1, 2))]
PARTS = ([2, 4], [0], [5, 1, 3])
"""Indices of groups, as they finish."""


def order_for(indices, **changes):
    chosen = sorted((GROUPS[index] for index in indices), key=lambda group: group.ticket)
    tickets = [group.ticket for group in chosen]
    lengths = [group.num_tokens for group in chosen]
    return Train(2, 1, tickets, lengths, [(1, 0), (2, 1)], **changes)


def orders_of(parts):
    last = len(parts) - 1
    return [order_for(part, is_first=at == 0, is_last=at == last) for at, part in enumerate(parts)]


@pytest.fixture(params=[open_backend, open_fsdp2], ids=["megatron", "fsdp2"])
def opener(request):
    return request.param


def train_whole(models, objective):
    result = train_step(
        order_for(range(6)), StoredGroups(GROUPS), models, objective, 1, Stopwatch(), MAX_PROMPT
    )
    return reduce_over_ranks(models.policy, result.metrics, result.weight), result


def train_streamed(models, objective, parts=PARTS):
    streamed = StreamedStep(StoredGroups(GROUPS), models, objective, Stopwatch(), MAX_PROMPT)
    for order in orders_of(parts):
        streamed.add(order)
    _, result = streamed.finish()
    return reduce_over_ranks(models.policy, result.metrics, result.weight), result


def run(model, opener, train, section, max_lag=4, reference=None, **changes):
    policy = opener(model, minibatches=1, warmup_steps=0, **changes)
    metrics, result = train(Models(policy, reference=reference), open_objective(max_lag, **section))
    weights = weights_of(policy)
    policy.close()
    return metrics, result, weights


def assert_equal_up_to_sums(streamed, whole):
    """The optimizer's first step is the gradient's sign: its norm and the metrics say how exact it is."""
    metrics = {name: value for name, value in streamed[0].items() if not name.startswith("stream/")}
    after = {name: metrics.pop(name) for name in ("actor/step_kl", "actor/step_gain")}
    assert metrics == pytest.approx({name: whole[0][name] for name in metrics}, rel=2e-5, abs=2e-6)
    assert after == pytest.approx({name: whole[0][name] for name in after}, rel=0.02)
    assert whole[0].keys() == metrics.keys() | after.keys()
    assert metrics["actor/grad_norm"] == pytest.approx(whole[0]["actor/grad_norm"], rel=2e-6)
    kept = ("num_trained", "num_masked", "stale_tickets", "weight")
    assert [getattr(streamed[1], name) for name in kept] == [getattr(whole[1], name) for name in kept]


@pytest.mark.parametrize(
    "section",
    [
        {},
        {"aggregation": "seq-mean-token-sum-norm", "verl_compat": True, "advantage": "dr_grpo"},
        {"verl_compat": True, "rejection": {"token_k2": 0.02}, "entropy_coeff": 0.01},
    ],
    ids=["token-mean", "rows", "rejected"],
)
def test_parts_give_the_gradient_and_the_metrics_of_the_whole_batch(model, opener, section):
    streamed, whole = (run(model, opener, train, section) for train in (train_streamed, train_whole))
    assert_equal_up_to_sums(streamed, whole)
    assert streamed[0]["stream/parts"] == 3.0 and streamed[0]["stream/overlapped_s"] > 0.0
    assert not unknown_names(streamed[0])


def test_the_same_parts_in_the_same_order_give_the_same_bits(model, opener):
    one, other = (run(model, opener, train_streamed, {}) for _ in range(2))
    assert_all_differ([load_file(model / "model.safetensors"), one[2]], in_every_tensor=True)
    assert is_bit_equal(one[2], other[2])
    assert {**one[0], "stream/overlapped_s": 0.0} == {**other[0], "stream/overlapped_s": 0.0}


def test_tokens_over_age_and_stale_groups_are_left_out_of_a_streamed_step(model):
    streamed, whole = (
        run(model, open_backend, train, {}, max_lag=1) for train in (train_streamed, train_whole)
    )
    assert whole[1].num_masked > 0
    assert_equal_up_to_sums(streamed, whole)


def refusals_of(section):
    config = Config.model_validate(
        {"model": {"path": "m"}, "data": {"train": "t"}, "reward": {"fn": "f"}, "algorithm": section}
    )
    learner = config.learner.model_copy(update={"stream": True})
    return [what for _, what, _ in find_stream_conflicts(config.model_copy(update={"learner": learner}))]


ADVANTAGES_OF_GROUPS = sorted(ADVANTAGES.keys() - BATCH_WIDE.keys())
LOSSES = sorted(POLICY_LOSSES.keys() - set(PICKS_TOKENS))


def gradient_of(objective, orders):
    """Return the gradient on log-probs [tokens of all groups], divided at the end, as the backends do."""
    batches, gradients = [], []
    for order in orders:
        groups = [group for group in GROUPS if group.ticket in order.tickets]
        batch = build_batch(groups, 2, {1: 0, 2: 1}).mask_over_age(objective.max_lag)
        squares_N = torch.full((batch.num_tokens,), 0.5)
        reference_N = batch.behaviour_N - 0.2
        batch = dataclasses.replace(batch, sum_pi_squared_N=squares_N, reference_N=reference_N)
        prox_N = batch.behaviour_N + 0.5 * torch.sin(batch.tokens_N.float())
        batch, _ = objective.prepare(batch, prox_N if objective.needs_prox else None)
        batches.append(batch)
    joined = join_batches(batches)
    streamed = StreamedStep(None, None, objective, Stopwatch(), MAX_PROMPT)  # type: ignore[arg-type]
    is_whole = len(orders) == 1
    for batch in batches:
        logprobs_N = (batch.behaviour_N + 0.1 * torch.cos(batch.tokens_N.float())).requires_grad_()
        entropy_N = logprobs_N.square()
        undivided = batch if is_whole else dataclasses.replace(batch, totals=UNDIVIDED)
        loss, _ = objective.loss(logprobs_N, entropy_N, undivided)
        (found,) = torch.autograd.grad(loss, logprobs_N)
        gradients.append(found if is_whole else found / streamed._find_divisor(joined.totals))
    per_ticket = {}
    for batch, gradient_N in zip(batches, gradients, strict=True):
        for at, ticket in enumerate(batch.tickets_G):
            per_ticket[ticket] = gradient_N[batch.group_R[batch.row_N] == at]
    return torch.cat([per_ticket[ticket] for ticket in sorted(per_ticket)])


@pytest.mark.parametrize("terms", [{}, {"entropy_coeff": 0.02, "kl": {"coef": 0.1}}], ids=["plain", "terms"])
@pytest.mark.parametrize("aggregation", ["token-mean", "token-sum", "seq-mean-token-mean"])
@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_that_is_allowed_divides_as_the_whole_batch_does(loss, aggregation, terms):
    if loss in BY_ROWS and aggregation == "token-sum":
        return  # not one of theirs, and refused with or without a stream
    section = {"loss": loss, "aggregation": "seq-mean-token-mean" if loss == "sapo" else aggregation, **terms}
    if loss == "geo_mean":
        section["aggregation"] = "token-mean"
    objective = open_objective(**section | {"kl": KlSection(**section.get("kl", {}))})
    is_refused = loss == "geo_mean" and bool(terms)
    assert bool(refusals_of(section)) is is_refused
    if is_refused:
        return
    whole, parts = (gradient_of(objective, orders) for orders in ([order_for(range(6))], orders_of(PARTS)))
    torch.testing.assert_close(parts, whole, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("advantage", ADVANTAGES_OF_GROUPS)
@pytest.mark.parametrize("correction", ["decoupled_token_is", "bypass_ppo_clip", "decoupled_seq_is"])
def test_every_advantage_that_is_allowed_is_that_of_the_whole_batch(advantage, correction):
    if "baseline" in advantage and correction.startswith("bypass"):
        return
    assert not refusals_of({"advantage": advantage, "correction": correction})
    objective = open_objective(advantage=advantage, correction=correction)
    whole, parts = (gradient_of(objective, orders) for orders in ([order_for(range(6))], orders_of(PARTS)))
    torch.testing.assert_close(parts, whole, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("advantage", ADVANTAGES_OF_GROUPS)
def test_a_rank_without_a_group_prepares_every_advantage_that_is_allowed(advantage):
    batch = dataclasses.replace(make_empty(2), sum_pi_squared_N=torch.zeros(0))
    prepared, _ = open_objective(advantage=advantage).prepare(batch, torch.zeros(0))
    assert prepared.advantages_N is not None and prepared.advantages_N.shape == (0,)


@pytest.mark.parametrize("advantage", sorted(BATCH_WIDE.keys() - {"gae", "vtrace"}))
def test_an_advantage_that_is_refused_is_another_in_parts(advantage):
    (said,) = refusals_of({"advantage": advantage})
    assert said.startswith(f"learner.stream does not go with algorithm.advantage: {advantage}, which ")
    objective = open_objective(advantage=advantage)
    whole, parts = (gradient_of(objective, orders) for orders in ([order_for(range(6))], orders_of(PARTS)))
    assert not torch.allclose(parts, whole, rtol=1e-3)


def test_memory_that_runs_out_in_a_later_part_computes_all_parts_anew(model, opener):
    whole = run(model, opener, train_streamed, {})
    policy = opener(model, minibatches=1, warmup_steps=0)
    guarded = GuardedModel(policy)
    guarded.begin_step([])
    objective = open_objective()
    streamed = StreamedStep(
        StoredGroups(GROUPS),
        Models(guarded),
        objective,
        Stopwatch(),
        MAX_PROMPT,  # type: ignore[arg-type]
    )
    first, *others = orders_of(PARTS)
    streamed.add(first)
    streamed._objective = Exhausted(objective)
    for order in others:
        streamed.add(order)
    _, result = streamed.finish()
    assert guarded.num_out_of_memory == 1
    assert result.metrics["actor/grad_norm"] == pytest.approx(whole[0]["actor/grad_norm"], rel=2e-6)
    policy.close()


def test_memory_that_runs_out_outside_a_pass_of_a_part_is_explained(model, monkeypatch):
    policy = open_backend(model, minibatches=1)

    def accumulate(parts, loss_fn, *, is_last):
        raise MemoryError("no memory")

    monkeypatch.setattr(policy, "accumulate", accumulate)
    with pytest.raises(UnstableTraining, match="no memory left") as caught:
        train_streamed(Models(GuardedModel(policy)), open_objective())
    assert caught.value.hint.startswith("Set learner.max_tokens_per_microbatch to ")
    policy.close()


@pytest.mark.long
@pytest.mark.parametrize("backend", ["megatron", "fsdp2"])
def test_two_ranks_give_in_parts_the_gradient_of_the_whole_batch(model, tmp_path, backend):
    job = {"kind": "streamed", "model": model, "backend": backend}
    run_ranks(2, [job | {"name": "parts"}, job | {"name": "whole"}], tmp_path)
    for rank in range(2):
        parts, whole = (
            json.loads((tmp_path / f"{name}.{rank}.json").read_text()) for name in ("parts", "whole")
        )
        assert parts["stream/parts"] == 3.0
        for name, tolerance in (("actor/grad_norm", 2e-6), ("actor/loss", 2e-5)):
            assert parts[name] == pytest.approx(whole[name], rel=tolerance, abs=1e-7)


class Exhausted:
    """An objective whose first loss finds no memory."""

    def __init__(self, inner):
        self.inner, self.num_losses = inner, 0

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def loss(self, *args):
        self.num_losses += 1
        if self.num_losses == 1:
            raise MemoryError("no memory")
        return self.inner.loss(*args)


def test_a_refused_update_names_the_groups_of_all_parts(model):
    policy = open_backend(model, minibatches=1)
    guarded = GuardedModel(policy)
    guarded.begin_step([("actor/grad_norm", 1e-9)])
    before = {name: tensor.clone() for name, tensor in policy.named_tensors()}
    metrics, _ = train_streamed(Models(guarded), open_objective())
    assert metrics["actor/skipped_updates"] == 1.0
    assert guarded.refused_tickets == {group.ticket for group in GROUPS}
    assert is_bit_equal(before, weights_of(policy))
    policy.close()


def test_the_order_for_a_whole_batch_remembers_its_parts():
    parts = orders_of(PARTS)
    whole = join_parts(parts)
    assert whole.is_first and whole.is_last
    assert whole.tickets == sorted(group.ticket for group in GROUPS)
    assert split_parts(whole) == parts
    sent = [decode_order(encode_order(part)) for part in parts]
    assert split_parts(decode_order(encode_order(whole))) == sent
    assert join_parts(parts[:1]) == parts[0]
