"""Learner ranks in processes of their own, over gloo, against one process: each kind of parallelism."""

import json

import pytest
from safetensors.torch import load_file

from tests.learner.parts.launching import assert_trained_alike, run_alone, run_ranks
from tests.learner.parts.publishing import assert_published_alike, publish_job, publishing_cluster
from tests.learner.parts.samples import save_model

OF_TWO = {
    "tp": {"tp": 2, "sequence_parallel": False},
    "tp_sequence_parallel": {"tp": 2, "recompute": "full"},
    "dp": {"dp": 2},
    "dp_overlap": {"dp": 2, "overlap": True, "max_tokens_per_microbatch": 64},
    "vpp": {"pp": 2, "vpp": 2, "max_tokens_per_microbatch": 64},
    "cp": {"cp": 2, "max_tokens_per_microbatch": 200, "recompute": "selective"},
}
OF_FOUR = {
    "tp_pp": {"tp": 2, "pp": 2},
    "pp_dp": {"pp": 2, "dp": 2, "vpp": 2, "overlap": True, "max_tokens_per_microbatch": 64},
    "tp_cp": {"tp": 2, "cp": 2},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"), "qwen3", num_layers=4)


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("tied"), "qwen2_tied", num_layers=4)


@pytest.fixture(scope="module")
def cluster():
    with publishing_cluster() as started:
        yield started


@pytest.fixture(scope="module")
def two_ranks(model, tied, cluster, tmp_path_factory):
    """Train in two processes, all layouts, and return the folder of results."""
    jobs = [{"name": name, "model": model, "changes": changes} for name, changes in OF_TWO.items()]
    jobs += [
        {"name": "tied", "model": tied, "changes": {"pp": 2, "max_tokens_per_microbatch": 64}},
        {"name": "resume", "kind": "resume", "model": model, "changes": OF_TWO["dp_overlap"]},
        {"name": "resume_stages", "kind": "resume", "model": tied, "changes": OF_TWO["vpp"]},
        publish_job(cluster, "publish_tp", 1, model, tp=2),
        publish_job(cluster, "publish_pp", 2, tied, pp=2),
        {"name": "guard", "kind": "guard", "model": model, "changes": {"dp": 2}},
        {"name": "calm", "kind": "plain_step", "model": model, "changes": {"dp": 2}},
        {"name": "stuck", "kind": "stuck", "model": model, "changes": {"tp": 2}},  # the last: ends the groups
    ]
    return run_ranks(2, jobs, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def four_ranks(model, tied, tmp_path_factory):
    jobs = [{"name": name, "model": model, "changes": changes} for name, changes in OF_FOUR.items()]
    jobs += [{"name": "critic", "kind": "critic", "model": tied, "changes": OF_FOUR["tp_pp"]}]
    return run_ranks(4, jobs, tmp_path_factory.mktemp("four"))


@pytest.fixture(scope="module")
def alone(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    return run_alone(model, folder), folder


@pytest.mark.parametrize("layout", OF_TWO)
def test_two_ranks_train_as_one_process_does(layout, two_ranks, alone):
    assert_trained_alike(two_ranks, layout, 2, *alone)


def test_tied_embeddings_stay_one_over_two_stages(tied, two_ranks, tmp_path):
    assert_trained_alike(two_ranks, "tied", 2, run_alone(tied, tmp_path), tmp_path)


def test_what_two_ranks_publish_is_what_one_process_publishes(model, tied, cluster, two_ranks, tmp_path):
    assert_published_alike(two_ranks, publish_job(cluster, "publish_tp", 3, model), tmp_path)
    assert_published_alike(two_ranks, publish_job(cluster, "publish_pp", 4, tied), tmp_path)


@pytest.mark.long
def test_a_critic_and_a_reference_share_the_policys_groups(tied, four_ranks, tmp_path):
    alone = run_alone(tied, tmp_path, "critic")
    assert_trained_alike(four_ranks, "critic", 4, alone, tmp_path)
    assert alone["is_reference_still"]
    assert alone["has_policy_moved"]
    assert max(map(abs, alone["values"])) > 1e-2
    assert "score.weight" in load_file(four_ranks / "critic/model.safetensors")


@pytest.mark.long
@pytest.mark.parametrize("layout", OF_FOUR)
def test_four_ranks_train_as_one_process_does(layout, four_ranks, alone):
    assert_trained_alike(four_ranks, layout, 4, *alone)


def test_training_moves_the_weights_far_beyond_the_tolerance(model, alone):
    start = load_file(model / "model.safetensors")
    trained = load_file(alone[1] / "alone/model.safetensors")
    moved = max((tensor - start[name]).abs().max().item() for name, tensor in trained.items())
    assert moved > 2e-3


def test_ranks_of_one_copy_say_how_many_count_each_token(two_ranks):
    copies = {name: json.loads((two_ranks / f"{name}.0.json").read_text())["num_copies"] for name in OF_TWO}
    assert copies == {name: 1 if name.startswith("dp") else 2 for name in OF_TWO}


@pytest.mark.parametrize(
    ("name", "reduced"),
    [("resume", {"a": 1.75, "a_max": 1.0}), ("resume_stages", {"a": 1.0, "a_max": 0.0})],
)
def test_a_resume_of_two_ranks_is_bit_exact_and_empty_shares_are_fine(two_ranks, name, reduced):
    results = [json.loads((two_ranks / f"{name}.{rank}.json").read_text()) for rank in range(2)]
    assert all(result["is_equal"] for result in results)
    assert results[0]["few"] == results[1]["few"]
    assert all(update["actor/skipped_updates"] == 0 for update in results[0]["few"])
    assert results[0]["reduced"] == pytest.approx(reduced)


# The guard: one rank's fault, one decision of both


def read(folder, name):
    return [json.loads((folder / f"{name}.{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("part", ["actor", "critic"])
def test_a_spike_on_one_rank_is_refused_by_both(two_ranks, part):
    for rank in read(two_ranks, "guard"):
        assert rank[part]["spike"] == {"skipped": 1.0, "num_refused": 1, "moved": 0.0}


@pytest.mark.parametrize("part", ["actor", "critic"])
def test_a_loss_that_is_not_a_number_on_one_rank_is_skipped_by_both(two_ranks, part):
    for rank in read(two_ranks, "guard"):
        assert rank[part]["nan"] == {"skipped": 1.0, "num_refused": 0, "moved": 0.0}


@pytest.mark.parametrize("part", ["actor", "critic"])
def test_one_rank_out_of_memory_tries_again_while_the_other_waits_and_both_train_the_same(two_ranks, part):
    calm, short = (rank[part] for rank in read(two_ranks, "guard"))
    assert calm["num_out_of_memory"] == 0 and calm["budget"] == 16384
    assert short["num_out_of_memory"] >= 1 and short["budget"] < 16384
    assert calm["sums"] == short["sums"]
    assert calm["sums"] == pytest.approx(read(two_ranks, "calm")[0][part], rel=1e-6)


def test_out_of_memory_inside_a_pass_of_both_ends_both_at_once_and_says_what_to_set(two_ranks):
    waiting, short = read(two_ranks, "stuck")
    assert "UnstableTraining" in short["error"] and "did not fit while other ranks wait" in short["error"]
    assert waiting["error"] and "imed out" not in waiting["error"], "its partner has left: no deadline passed"
