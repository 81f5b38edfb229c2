"""A mixture of experts over several ranks, over gloo, against one process: each way to share its experts."""

import json

import pytest
import torch
from safetensors.torch import load_file

from asyncrl.core.errors import ConfigError
from tests.learner.checkpoint.test_checkpoint_layouts import (
    check_same_state,
    check_went_on_the_same,
    run_layouts,
    train_alone,
)
from tests.learner.parts.launching import assert_trained_alike, run_alone, run_ranks
from tests.learner.parts.samples import MIXTURES, save_model
from tests.learner.parts.training import open_backend, train

SMALL = {"max_tokens_per_microbatch": 64}
SHORT = {"ep": {"dp": 2, "ep": 2, **SMALL}}
OF_TWO = {
    "tp_ep": {"tp": 2, "ep": 2},
    "dp": {"dp": 2},
    "pp": {"pp": 2, **SMALL},
    "tp_etp": {"tp": 2},
    "cp_ep": {"cp": 2, "ep": 2},
    "ep_recompute": {"dp": 2, "ep": 2, "recompute": "full"},
    "ep_overlap": {"dp": 2, "ep": 2, "overlap": True, **SMALL},
    "vpp": {"pp": 2, "vpp": 2, **SMALL},
}
OF_FOUR = {
    "ep4": {"dp": 4, "ep": 4},
    "ep_dp": {"dp": 4, "ep": 2},
    "tp_ep_dp": {"tp": 2, "ep": 2, "dp": 2},
    "tp_ep4": {"tp": 2, "ep": 4, "dp": 2},
    "pp_ep": {"pp": 2, "ep": 2, "dp": 2, **SMALL},
    "vpp_ep": {"pp": 2, "vpp": 2, "ep": 2, "dp": 2, "overlap": True, **SMALL},
    "tp_cp_ep": {"tp": 2, "cp": 2, "ep": 2},
    "dp_etp": {"tp": 2, "dp": 2},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"), "qwen3_moe", num_layers=4)


@pytest.fixture(scope="module")
def alone(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    return run_alone(model, folder, "experts"), folder


def run_jobs(world_size, layouts, model, out):
    same = {"kind": "experts", "model": model}
    return run_ranks(world_size, [same | {"name": name, "changes": c} for name, c in layouts.items()], out)


def check(out, name, world_size, alone, folder):
    assert_trained_alike(out, name, world_size, alone, folder)
    for rank in range(world_size):
        found = json.loads((out / f"{name}.{rank}.json").read_text())
        assert found["wrong_parts"] == []


@pytest.fixture(scope="module")
def short_ranks(model, tmp_path_factory):
    resume = {"name": "resume", "kind": "resume", "model": model, "changes": SHORT["ep"]}
    jobs = [{"name": n, "kind": "experts", "model": model, "changes": c} for n, c in SHORT.items()]
    return run_ranks(2, [*jobs, resume], tmp_path_factory.mktemp("short"))


@pytest.mark.parametrize("name", SHORT)
def test_two_ranks_that_share_experts_train_as_one_process_does(name, short_ranks, alone):
    check(short_ranks, name, 2, *alone)


def test_a_resume_of_shared_experts_is_bit_exact_and_a_rank_without_rows_takes_part(short_ranks):
    results = [json.loads((short_ranks / f"resume.{rank}.json").read_text()) for rank in range(2)]
    assert all(result["is_equal"] for result in results)
    assert results[0]["few"] == results[1]["few"]
    assert all(update["actor/skipped_updates"] == 0 for update in results[0]["few"])


@pytest.mark.long
def test_every_layout_of_two_ranks_trains_as_one_process_does(model, alone, tmp_path):
    run_jobs(2, OF_TWO, model, tmp_path)
    for name in OF_TWO:
        check(tmp_path, name, 2, *alone)


@pytest.mark.long
def test_every_layout_of_four_ranks_trains_as_one_process_does(model, alone, tmp_path):
    run_jobs(4, OF_FOUR, model, tmp_path)
    for name in OF_FOUR:
        check(tmp_path, name, 4, *alone)


@pytest.mark.long
@pytest.mark.parametrize("kind", MIXTURES)
def test_two_layers_over_stages_one_of_which_may_be_dense(kind, tmp_path):
    model = save_model(tmp_path / "model", kind)
    alone = run_alone(model, tmp_path, "experts")
    layouts = {
        "pp_ep": {"pp": 2, "ep": 2, "dp": 2, **SMALL},
        "ep4": OF_FOUR["ep4"],
        "tp_ep": OF_FOUR["tp_ep_dp"],
    }
    run_jobs(4, layouts, model, tmp_path)
    for name in layouts:
        check(tmp_path, name, 4, alone, tmp_path)


@pytest.mark.long
def test_three_ranks_of_fsdp2_publish_each_expert_once(model, alone, tmp_path):
    """Eight experts are three, three and two."""
    run_jobs(3, {"fsdp2": {"dp": 3}}, model, tmp_path)
    for rank in range(3):
        assert json.loads((tmp_path / f"fsdp2.{rank}.json").read_text())["wrong_parts"] == []
    weights, wanted = (load_file(at / "model.safetensors") for at in (tmp_path / "fsdp2", alone[1] / "alone"))
    assert weights.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(weights[name], tensor, rtol=0, atol=1e-4)


@pytest.mark.long
def test_state_goes_through_other_layouts_without_a_changed_bit(model, tmp_path):
    metrics, weights = train_alone(model, tmp_path)
    for world_size, layouts in (
        (2, {name: OF_TWO[name] for name in ("ep_overlap", "tp_ep", "tp_etp")}),
        (4, {"pp_ep": OF_FOUR["pp_ep"]}),
    ):
        run_layouts(world_size, layouts, model, tmp_path / "state", tmp_path)
        for name in layouts:
            check_same_state(tmp_path / name / "state", tmp_path / "state")
            check_went_on_the_same(tmp_path, name, world_size, metrics, weights)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tp": 2, "etp": 1}, "etp: 1 with ep: 1 and tp: 2 would train wrongly"),
        ({"tp": 2, "dp": 2, "ep": 2, "etp": 2}, "needs GPUs: gloo gathers parts of equal size alone"),
        ({"dp": 3, "ep": 3}, "ep: 3 does not divide the model's experts: 8"),
        ({"dp": 2, "ep": 8}, "ep x etp: 8 does not divide tp x cp x dp, the ranks of a stage: 2"),
        ({"tp": 2, "sequence_parallel": False}, "needs learner.sequence_parallel"),
        ({"kernels": "te"}, "kernels is te, which has no layers with experts"),
    ],
)
def test_a_layout_that_would_train_wrongly_or_not_at_all_is_refused_by_name(model, changes, said):
    with pytest.raises(ConfigError, match=said):
        open_backend(model, **changes)


def test_a_dense_model_has_no_experts_to_share(tmp_path):
    with pytest.raises(ConfigError, match="the model has none"):
        open_backend(save_model(tmp_path), dp=2, ep=2)


def test_the_metrics_of_routers_are_those_of_the_routers(model):
    """Even loads are 1; here each expert gets some tokens, and none gets all."""
    backend = open_backend(model)
    (first, *_), num_experts = train(backend, range(1)), 8
    backend.close()
    assert 0 <= first["actor/expert_load_min"] < 1 < first["actor/expert_load_max"] <= num_experts / 2
    assert 0 < first["actor/router_entropy"] < 2.08
