"""Every pair of parallelisms on every kind of model, and three at once, against one process."""

import pytest

from tests.learner.parts.launching import assert_trained_alike, run_alone, run_ranks
from tests.learner.parts.samples import save_model

pytestmark = pytest.mark.long

KINDS = ("qwen2", "qwen2_tied", "qwen3", "llama", "phi3", "gemma")
SMALL = {"max_tokens_per_microbatch": 64}
ALONE = {
    "tp": {"tp": 2, "sequence_parallel": False},
    "sp": {"tp": 2},
    "pp": {"pp": 2} | SMALL,
    "vpp": {"pp": 2, "vpp": 2} | SMALL,
    "cp": {"cp": 2},
    "dp": {"dp": 2} | SMALL,
    "dp_overlap": {"dp": 2, "overlap": True} | SMALL,
}
SAME_RANKS = ({"tp", "sp"}, {"pp", "vpp"}, {"dp", "dp_overlap"})
PAIRS = {
    f"{one}-{other}": ALONE[one] | ALONE[other]
    for index, one in enumerate(ALONE)
    for other in list(ALONE)[index + 1 :]
    if {one, other} not in SAME_RANKS
}


@pytest.fixture(scope="module", params=KINDS)
def alone(request, tmp_path_factory):
    """Return the model, what one process trained with it, and where its weights are."""
    model = save_model(tmp_path_factory.mktemp(request.param), request.param, num_layers=4)
    folder = tmp_path_factory.mktemp("alone")
    return model, run_alone(model, folder), folder


def check(layouts, world_size, alone, out):
    model, result, folder = alone
    jobs = [{"name": name, "model": model, "changes": changes} for name, changes in layouts.items()]
    run_ranks(world_size, jobs, out)
    for name in layouts:
        assert_trained_alike(out, name, world_size, result, folder)


def test_each_parallelism_alone(alone, tmp_path):
    check(ALONE, 2, alone, tmp_path)


@pytest.mark.parametrize("part", range(6))
def test_all_pairs(alone, part, tmp_path):
    names = sorted(PAIRS)[part::6]
    assert len(PAIRS) == 18
    check({name: PAIRS[name] for name in names}, 4, alone, tmp_path)


def test_tensor_pipeline_and_data_parallelism_at_once(alone, tmp_path):
    check({"three": ALONE["sp"] | ALONE["pp"] | ALONE["dp"]}, 8, alone, tmp_path)
