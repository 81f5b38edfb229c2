"""Router replay: routers take recorded experts on all layouts of ranks, and count where they differ."""

import dataclasses
import gc
import weakref

import pytest
import torch
from safetensors.torch import load_file, save_file

from asyncrl.core.errors import DataError
from learner.backend import Models
from learner.batching.batch import build_batch
from learner.batching.routing import Recorded
from learner.megatron.backend import MegatronValueBackend
from learner.megatron.model.experts import ReplayingRouter
from learner.report import Stopwatch
from learner.step import ask_models
from tests.learner.backends.experts.test_expert_parallel import OF_FOUR, OF_TWO, SMALL, check
from tests.learner.parts.launching import run_alone, run_ranks
from tests.learner.parts.samples import make_groups, route_groups, save_model
from tests.learner.parts.training import open_backend, open_objective, record_experts, take_step

RECORDS = {"num_layers": 4, "num_active": 2, "num_experts": 8}
SHORT = {"ep_recompute": {"dp": 2, "ep": 2, "recompute": "full", **SMALL}}
RATES = ("actor/router_flip_rate", "actor/router_unrecorded")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"), "qwen3_moe", num_layers=4)


@pytest.fixture(scope="module")
def sparse(tmp_path_factory):
    """A model with one layer of experts, and a dense one behind it."""
    return save_model(tmp_path_factory.mktemp("sparse"), "qwen3_moe")


def loss(logprobs_N, entropy_N, part):
    return ((logprobs_N + 0.1 * entropy_N) * (1.7 * part.tokens_N).sin() * part.loss_mask_N).sum(), {}


def make_batch():
    return build_batch(make_groups(seed=4), 0, {1: 0})


def read_routes(backend, batch, num_layers):
    """Return the batch with what its own routers choose, in descending order of the experts' numbers."""
    routers = [
        one for chunk in backend._chunks for one in chunk.modules() if isinstance(one, ReplayingRouter)
    ]
    experts_N = torch.full((batch.num_tokens, num_layers, 2), -1, dtype=torch.int16)

    def note(router, _, output):
        chosen = output[1].nonzero()[:, 1].view(-1, 2).flip(-1)
        experts_N[:, router.layer_number - 1] = chosen.to(torch.int16)

    hooks = [router.register_forward_hook(note) for router in routers]
    budget = backend.max_tokens_per_microbatch
    backend.set_max_tokens_per_microbatch(batch.num_tokens)
    backend.logprobs(batch)
    backend.set_max_tokens_per_microbatch(budget)
    for hook in hooks:
        hook.remove()
    experts_N[torch.tensor(batch.cu_seqlens[1:]) - 1] = -1
    return dataclasses.replace(batch, experts_N=experts_N)


def train_once(model, batch, **changes):
    backend = open_backend(model, **changes)
    batch = batch(backend)
    before_N = backend.logprobs(batch)[0]
    metrics = backend.update(batch, loss)
    weights = {name: tensor.clone() for name, tensor in backend.named_tensors()}
    backend.close()
    return before_N, metrics, weights


@pytest.mark.parametrize("changes", [{}, {"recompute": "full", "max_tokens_per_microbatch": 64}], ids=str)
def test_what_routers_would_choose_anyway_changes_no_bit(model, changes):
    lone_N, metrics, weights = train_once(model, lambda _: make_batch(), **changes)
    found_N, replayed, found = train_once(model, lambda one: read_routes(one, make_batch(), 4), **changes)
    assert found_N.equal(lone_N)
    assert [replayed.pop(name) for name in RATES] == [0.0, 0.0]
    assert replayed == metrics
    assert all(found[name].equal(tensor) for name, tensor in weights.items())


def test_other_experts_than_the_router_s_are_taken_and_its_own_logits_weigh_them(model):
    lone_N, metrics, weights = train_once(model, lambda _: make_batch())
    found_N, replayed, found = train_once(model, lambda _: record_experts(make_batch(), **RECORDS))
    assert (found_N - lone_N).abs().max() > 0.05
    assert abs(replayed["actor/grad_norm"] - metrics["actor/grad_norm"]) > 1e-3
    routers = [name for name in weights if name.endswith("mlp.gate.weight")]
    assert len(routers) == 3
    assert not any(found[name].equal(weights[name]) for name in routers)


def test_flips_and_tokens_without_rows_are_counted_exactly(sparse):
    """Half of the rows name the right experts, some others, and some none."""
    num_flipped, num_bare, num_known = 5, 7, 0

    def record(backend):
        nonlocal num_known
        batch = read_routes(backend, make_batch(), 2)
        read_N = torch.ones(batch.num_tokens, dtype=torch.bool)
        read_N[torch.tensor(batch.cu_seqlens[1:]) - 1] = False
        places = read_N.nonzero()[:, 0]
        flipped, bare = places[:num_flipped], places[num_flipped : num_flipped + num_bare]
        for position in flipped:
            row = batch.experts_N[position, 0]
            row[0] = min(set(range(8)) - set(row.tolist()))
        batch.experts_N[bare] = -1
        num_known = len(places)
        return batch

    _, metrics, _ = train_once(sparse, record, max_tokens_per_microbatch=64)
    assert metrics[RATES[0]] == pytest.approx(num_flipped / (num_known - num_bare), rel=1e-6)
    assert metrics[RATES[1]] == pytest.approx(num_bare / num_known, rel=1e-5)


def test_a_set_in_another_order_is_no_flip_and_keeps_the_router_s_order():
    recorded = Recorded(torch.tensor([[3, 1], [2, 3], [-1, -1]], dtype=torch.int16))
    assert recorded.choose(torch.tensor([[1, 3], [1, 3], [1, 3]])).tolist() == [[1, 3], [2, 3], [1, 3]]
    assert recorded.is_flipped_N.tolist() == [False, True, False]
    assert recorded.is_there_N.tolist() == [True, True, False]


def test_a_closed_learner_s_experts_are_let_go_of(model):
    backend = open_backend(model)
    backend.update(make_batch(), loss)
    (chunk,) = map(weakref.ref, backend._chunks)
    backend.close()
    del backend
    gc.collect()
    assert chunk() is None


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ([3, 3], r"\[3, 3\] are not 2 different ones of 8"),
        ([3, 8], r"\[3, 8\] are not"),
        ([-2, -2], r"\[-2, -2\] are not"),
        ([3, -1], r"\[3, -1\] are not"),
    ],
)
def test_a_row_that_no_router_can_have_chosen_is_refused_before_anything_is_trained(model, row, said):
    backend, batch = open_backend(model), record_experts(make_batch(), **RECORDS)
    batch.experts_N[batch.cu_seqlens[3] + 2, 2] = torch.tensor(row, dtype=torch.int16)
    before = {name: tensor.clone() for name, tensor in backend.named_tensors()}
    for call in (lambda: backend.logprobs(batch), lambda: backend.update(batch, loss)):
        with pytest.raises(
            DataError, match=rf"ticket {batch.tickets_G[int(batch.group_R[3])]}, token 2 .* layer 2.*{said}"
        ):
            call()
    assert all(before[name].equal(tensor) for name, tensor in backend.named_tensors())
    fine = dataclasses.replace(batch, experts_N=None)
    assert backend.update(fine, loss)["actor/skipped_updates"] == 0
    backend.close()


def test_rows_of_a_dense_layer_are_not_read_and_those_of_another_model_are_refused(model):
    backend, batch = open_backend(model), record_experts(make_batch(), **RECORDS)
    wanted_N = backend.logprobs(batch)[0]
    batch.experts_N[:, 1] = 99
    assert backend.logprobs(batch)[0].equal(wanted_N)
    with pytest.raises(DataError, match="are of 3 layers and 2 a token, those of the model of 4 and 2"):
        backend.logprobs(dataclasses.replace(batch, experts_N=batch.experts_N[:, :3]))
    backend.close()


def test_a_reference_and_a_critic_choose_for_themselves(tmp_path):
    model = save_model(tmp_path / "model", "qwen3_moe", num_layers=4)
    path = model / "model.safetensors"
    save_file(load_file(path) | {"score.weight": torch.linspace(-1, 1, 64)[None]}, path)
    policy = open_backend(model)
    reference, critic = open_backend(model, is_frozen=True), open_backend(model, None, MegatronValueBackend)
    batch, objective = (
        record_experts(make_batch(), **RECORDS),
        open_objective(kl={"where": "loss", "coef": 0.1}),
    )
    asked, prox_N, _ = ask_models(batch, Models(policy, critic, reference), objective, Stopwatch())
    assert prox_N.equal(policy.logprobs(batch)[0])
    assert asked.reference_N.equal(policy.logprobs(make_batch())[0])
    assert not asked.reference_N.equal(prox_N)
    assert asked.values_N.equal(critic.values(make_batch()))
    assert not asked.values_N.equal(critic.values(batch))
    for one in (critic, reference, policy):
        one.close()


def test_a_step_updates_the_policy_with_recorded_experts_and_the_critic_without(tmp_path, monkeypatch):
    model = save_model(tmp_path / "model", "qwen3_moe")
    policy, critic, given = open_backend(model), open_backend(model, None, MegatronValueBackend), []
    for one in (policy, critic):
        update = one.update
        monkeypatch.setattr(
            one,
            "update",
            lambda batch, loss, one=one, update=update: given.append((one, batch)) or update(batch, loss),
        )
    take_step(Models(policy, critic), open_objective(advantage="gae"), route_groups(make_groups()))
    assert {one for one, batch in given if batch.experts_N is not None} == {policy}
    assert {one for one, batch in given if batch.experts_N is None} == {critic}
    critic.close()
    policy.close()


@pytest.fixture(scope="module")
def alone(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    return run_alone(model, folder, "experts", records=RECORDS), folder


def check_layouts(world_size, layouts, model, out, alone):
    same = {"kind": "experts", "model": model, "records": RECORDS}
    run_ranks(world_size, [same | {"name": name, "changes": c} for name, c in layouts.items()], out)
    for name in layouts:
        check(out, name, world_size, *alone)
    assert all(0.5 < one[RATES[0]] < 1 and 0.05 < one[RATES[1]] < 0.2 for one in alone[0]["metrics"])


def test_two_ranks_replay_the_routes_of_one_process(model, alone, tmp_path):
    check_layouts(2, SHORT, model, tmp_path, alone)


@pytest.mark.long
def test_every_layout_of_two_ranks_replays_the_routes_of_one_process(model, alone, tmp_path):
    layouts = OF_TWO | {
        "cp_ep": {"cp": 2, "ep": 2, **SMALL},
        "pp_recompute": {**OF_TWO["pp"], "recompute": "full"},
    }
    check_layouts(2, layouts, model, tmp_path, alone)


@pytest.mark.long
def test_every_layout_of_four_ranks_replays_the_routes_of_one_process(model, alone, tmp_path):
    check_layouts(4, OF_FOUR, model, tmp_path, alone)


def test_one_process_replays_the_same_in_small_microbatches_and_recomputed(model, alone, tmp_path):
    changes = {"recompute": "full", **SMALL}
    found = run_alone(model, tmp_path, "experts", records=RECORDS, changes=changes)
    for ours, wanted in zip(found["metrics"], alone[0]["metrics"], strict=True):
        assert ours == pytest.approx(wanted, abs=1e-5)
