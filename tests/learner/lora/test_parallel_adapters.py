"""Adapters under each kind of parallelism, over gloo, against one process."""

import json

import pytest
from safetensors.torch import load_file

from asyncrl.core.errors import ConfigError
from tests.learner.lora.adapters import make_adapter
from tests.learner.parts.launching import assert_trained_alike, run_alone, run_ranks
from tests.learner.parts.publishing import assert_published_alike, publish_job, publishing_cluster
from tests.learner.parts.samples import MIXTURES, save_model
from tests.learner.parts.training import open_backend

OF_TWO = {
    "tp": {"tp": 2, "sequence_parallel": False},
    "tp_sequence_parallel": {"tp": 2, "recompute": "full"},
    "dp_overlap": {"dp": 2, "overlap": True, "max_tokens_per_microbatch": 64},
    "pp": {"pp": 2, "recompute": "full", "max_tokens_per_microbatch": 64},
    "cp": {"cp": 2, "max_tokens_per_microbatch": 200},
    "fsdp2": {"backend": "fsdp2", "dp": 2, "recompute": "full"},
}
OF_FOUR = {
    "tp_pp": {"tp": 2, "pp": 2},
    "vpp_dp": {"pp": 2, "dp": 2, "vpp": 2, "overlap": True, "max_tokens_per_microbatch": 64},
    "tp_cp": {"tp": 2, "cp": 2},
    "tp_dp": {"tp": 2, "dp": 2, "overlap": True},
}
OF_EXPERTS = {
    "ep": (2, {"dp": 2, "ep": 2, "max_tokens_per_microbatch": 64}),
    "tp_ep": (4, {"tp": 2, "dp": 2, "ep": 2, "recompute": "full"}),
    "pp_ep": (4, {"pp": 2, "dp": 2, "ep": 2}),
}
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
PUBLISHING = {"tp": {"tp": 2}, "pp": {"pp": 2}, "fsdp2": {"backend": "fsdp2", "dp": 2}}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"), "qwen2_tied", num_layers=4)


@pytest.fixture(scope="module")
def lora(model, tmp_path_factory):
    return make_adapter(model, tmp_path_factory.mktemp("adapter"))


@pytest.fixture(scope="module")
def two_ranks(model, lora, tmp_path_factory):
    jobs = [
        {"name": name, "model": model, "changes": {**changes, "lora": lora}}
        for name, changes in OF_TWO.items()
    ]
    jobs.append({"name": "resume", "kind": "resume", "model": model, "changes": jobs[2]["changes"]})
    return run_ranks(2, jobs, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def alone(model, lora, tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    return run_alone(model, folder, changes={"lora": lora}), folder


@pytest.mark.parametrize("layout", OF_TWO)
def test_two_ranks_train_adapters_as_one_process_does(layout, two_ranks, alone):
    assert_trained_alike(two_ranks, layout, 2, *alone)


def test_training_moves_the_merged_weights_far_beyond_the_tolerance(model, lora, alone):
    start = load_file(model / "model.safetensors")
    trained = load_file(alone[1] / "alone/model.safetensors")
    assert max(float((trained[name] - tensor).abs().max()) for name, tensor in start.items()) > 2e-3
    assert all(name.endswith(("lora_A.weight", "lora_B.weight")) for name, _ in alone[0]["exported"])


def test_a_resume_of_adapters_on_two_ranks_is_bit_exact(two_ranks):
    results = [json.loads((two_ranks / f"resume.{rank}.json").read_text()) for rank in range(2)]
    assert all(found["is_equal"] for found in results)


@pytest.mark.long
def test_ranks_publish_the_adapters_alone_each_its_parts(model, lora, tmp_path):
    with publishing_cluster() as cluster:
        jobs = [
            publish_job(cluster, name, number, model, lora=lora, **changes)
            for number, (name, changes) in enumerate(PUBLISHING.items(), 1)
        ]
        out = run_ranks(2, jobs, tmp_path)
        for number, job in enumerate(jobs, len(jobs) + 1):
            changes = {"backend": "fsdp2"} if job["name"] == "fsdp2" else {}
            alone = publish_job(cluster, job["name"], number, model, lora=lora, **changes)
            assert_published_alike(out, alone, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("layout", OF_FOUR)
def test_four_ranks_train_adapters_as_one_process_does(layout, model, lora, alone, tmp_path):
    job = {"name": layout, "model": model, "changes": {**OF_FOUR[layout], "lora": lora}}
    assert_trained_alike(run_ranks(4, [job], tmp_path), layout, 4, *alone)


@pytest.mark.long
@pytest.mark.parametrize("kind", MIXTURES)
def test_ranks_that_share_experts_train_adapters_of_attention_as_one_process_does(kind, tmp_path):
    model = save_model(tmp_path / "model", kind, num_layers=4)
    lora = make_adapter(model, tmp_path / "adapter", targets=ATTENTION)
    alone = run_alone(model, tmp_path, changes={"lora": lora})
    for layout, (world_size, changes) in OF_EXPERTS.items():
        job = {"name": layout, "model": model, "changes": {**changes, "lora": lora}}
        assert_trained_alike(run_ranks(world_size, [job], tmp_path), layout, world_size, alone, tmp_path)


@pytest.mark.parametrize("kind", MIXTURES)
def test_adapters_on_experts_are_refused(kind, tmp_path):
    model = save_model(tmp_path / "model", kind, num_layers=2)
    targets = ("w1",) if kind == "mixtral" else ("up_proj",)
    with pytest.raises(ConfigError, match=rf"{targets[0]} are matrices of experts"):
        make_adapter(model, tmp_path / "adapter", targets=targets)
    with pytest.raises(ConfigError, match=r"experts have no adapters|no matrix called"):
        open_backend(model, lora={"rank": 2, "targets": targets})
