"""Four ranks that publish together."""

import pytest

from tests.learner.parts.launching import run_ranks
from tests.learner.parts.publishing import assert_published_alike, publish_job, publishing_cluster
from tests.learner.parts.samples import save_model

pytestmark = pytest.mark.long

LAYOUTS = {
    "tp_pp": {"tp": 2, "pp": 2, "dtype": "bfloat16"},
    "tp_pp_float32": {"tp": 2, "pp": 2, "max_tokens_per_microbatch": 64},
    "tp_vpp": {"tp": 2, "pp": 2, "vpp": 2, "max_tokens_per_microbatch": 64},
    "pp_dp": {"pp": 2, "dp": 2, "overlap": True, "max_tokens_per_microbatch": 64},
}


@pytest.mark.parametrize("kind", ["qwen2_tied", "qwen3"])
def test_what_four_ranks_publish_is_what_one_process_publishes(kind, tmp_path):
    """The vocabulary of 131 does not divide by two, so its padding would show."""
    model = save_model(tmp_path / "model", kind, num_layers=4)
    with publishing_cluster() as cluster:
        jobs = [
            publish_job(cluster, name, number, model, **changes)
            for number, (name, changes) in enumerate(LAYOUTS.items(), start=1)
        ]
        run_ranks(4, jobs, tmp_path)
        for number, (name, changes) in enumerate(LAYOUTS.items(), start=len(jobs) + 1):
            dtype = {"dtype": changes["dtype"]} if "dtype" in changes else {}
            assert_published_alike(tmp_path, publish_job(cluster, name, number, model, **dtype), tmp_path)
