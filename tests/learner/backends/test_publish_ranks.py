"""Ranks that publish together, each writing its own parts, against the gathers of the same ranks."""

import re
import signal

import pytest

from tests.learner.parts.launching import run_ranks
from tests.learner.parts.publishing import assert_published_alike, publish_job, publishing_cluster
from tests.learner.parts.samples import save_model

pytestmark = pytest.mark.long

OF_TWO = {
    "tp": {"tp": 2},
    "tp_bfloat16": {"tp": 2, "dtype": "bfloat16"},
    "pp": {"pp": 2, "max_tokens_per_microbatch": 64},
    "dp": {"dp": 2, "overlap": True, "max_tokens_per_microbatch": 64},
    "cp": {"cp": 2},
    "fsdp2": {"backend": "fsdp2"},
    "fsdp2_bfloat16": {"backend": "fsdp2", "dtype": "bfloat16"},
}
OF_FOUR = {
    "tp_pp": {"tp": 2, "pp": 2, "dtype": "bfloat16"},
    "tp_pp_float32": {"tp": 2, "pp": 2, "max_tokens_per_microbatch": 64},
    "tp_vpp": {"tp": 2, "pp": 2, "vpp": 2, "max_tokens_per_microbatch": 64},
    "pp_dp": {"pp": 2, "dp": 2, "overlap": True, "max_tokens_per_microbatch": 64},
    "tp_dp": {"tp": 2, "dp": 2, "max_tokens_per_microbatch": 64},
}
ALONE = ("dtype", "backend")


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen2_tied", "qwen3", "phi3", "gemma"])
@pytest.mark.parametrize("layouts", [OF_TWO, OF_FOUR], ids=["two", "four"])
def test_what_ranks_publish_is_what_one_process_publishes(kind, layouts, tmp_path):
    """The vocabulary of 131 does not divide by two, so its padding would show."""
    model = save_model(tmp_path / "model", kind, num_layers=4)
    with publishing_cluster() as cluster:
        jobs = [
            publish_job(cluster, name, number, model, **changes)
            for number, (name, changes) in enumerate(layouts.items(), start=1)
        ]
        run_ranks(2 if layouts is OF_TWO else 4, jobs, tmp_path)
        for number, (name, changes) in enumerate(layouts.items(), start=len(jobs) + 1):
            kept = {key: changes[key] for key in ALONE if key in changes}
            assert_published_alike(tmp_path, publish_job(cluster, name, number, model, **kept), tmp_path)


def test_ranks_that_cannot_map_the_segment_gather_as_before(tmp_path):
    model = save_model(tmp_path / "model", "qwen3")
    with publishing_cluster() as cluster:
        job = publish_job(cluster, "elsewhere", 1, model, elsewhere=[1], tp=2)
        run_ranks(2, [job], tmp_path)
        alone = publish_job(cluster, "elsewhere", 2, model)
        assert_published_alike(tmp_path, alone, tmp_path, were_direct=[False, False, False])


def test_a_rank_that_dies_after_its_copy_ends_the_others_and_nothing_is_committed(tmp_path):
    model = save_model(tmp_path / "model", "qwen3")
    with publishing_cluster() as cluster:
        job = publish_job(cluster, "dies", 1, model, tp=2) | {"dies": 1}
        run_ranks(2, [job], tmp_path, wanted_codes=[1, -signal.SIGKILL])
        assert cluster.publisher.status().version == (10, 10)
        log = (tmp_path / "rank.0.log").read_text()
        assert re.search("Connection (closed|reset) by peer", log), log[-3000:]
