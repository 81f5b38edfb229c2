"""Learner ranks in processes of their own: train under several layouts and write what came out.

python -m tests.learner.parts.rank_process

Reads requests from stdin, a line each: {"world_size", "jobs", "out"}, and forks a process per rank, which
has all of its imports already (six seconds each). Answers a line with the ranks' exit codes. A job is
{"name", "port", "model"} and what its kind takes: "changes" for most, and "kind" if it is no plain run.
This process itself must never compute: a fork has none of its parent's threads.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch

from learner.backend import Placement
from learner.batching.batch import build_batch
from learner.fsdp2.backend import Fsdp2Backend
from learner.megatron.backend import MegatronBackend, MegatronValueBackend
from learner.megatron.optimizer import updates
from tests.learner.backends.experts.expert_ranks import run_experts
from tests.learner.backends.fsdp2.fsdp2_ways import run_fsdp2
from tests.learner.checkpoint.resharding import run_resharded
from tests.learner.guard.guarding import run_guard, run_plain_step, run_stuck
from tests.learner.parts.fetching import run_fetched
from tests.learner.parts.gathered import run_gathered
from tests.learner.parts.publishing import run_publish
from tests.learner.parts.samples import make_groups
from tests.learner.parts.training import open_backend, train, train_values
from tests.learner.streaming.ranks import run_streamed

updates.OVERLAP_BUCKET_ELEMENTS = 20_000  # several buckets, so that overlap has an order to keep


def run_plain(placement: Placement, job: dict[str, Any], out: Path) -> dict[str, Any]:
    """Train three steps; say what the log-probs were, and what this rank exports."""
    make = Fsdp2Backend if job["changes"].get("backend") == "fsdp2" else MegatronBackend
    backend, options = (
        open_backend(Path(job["model"]), placement, make, **job["changes"]),
        job.get("groups", {}),
    )
    metrics = train(backend, range(3), **options)
    # Right after an update, as a publish does: overlapped weights are not fetched yet.
    exported = [[name, float(tensor.double().sum())] for name, tensor in backend.named_tensors()]
    backend.save_hf(out / job["name"])
    batch = build_batch(make_groups(seed=9, **options), 0, {1: 0})
    logprobs_N, entropy_N, squares_N = backend.logprobs_and_squares(batch)
    result = {
        "metrics": metrics,
        "logprobs": logprobs_N.tolist(),
        "entropy": entropy_N.tolist(),
        "squares": squares_N.tolist(),
        "exported": exported,
        "num_copies": backend.num_copies,
        "shares_prompts": backend.shares_prompts,
    }
    backend.close()
    return result


def run_critic(placement: Placement, job: dict[str, Any], out: Path) -> dict[str, Any]:
    """Train a critic beside a policy that learns and a reference that does not, in the same groups."""
    model = Path(job["model"])
    policy = open_backend(model, placement, **job["changes"])
    reference = open_backend(model, placement, is_frozen=True, **job["changes"])
    critic = open_backend(model, placement, MegatronValueBackend, **job["changes"])
    batch = build_batch(make_groups(seed=9), 0, {1: 0})
    before_N = reference.logprobs(batch)[0]
    train(policy, range(1))
    metrics = train_values(critic, range(3))
    result = {
        "metrics": metrics,
        "values": critic.values(batch).tolist(),
        "is_reference_still": bool(torch.equal(reference.logprobs(batch)[0], before_N)),
        "has_policy_moved": not torch.equal(policy.logprobs(batch)[0], before_N),
    }
    critic.save_hf(out / job["name"])
    for backend in (critic, reference, policy):
        backend.close()
    return result


def run_resume(placement: Placement, job: dict[str, Any], out: Path) -> dict[str, Any]:
    """Go back to a saved state and train again; then a minibatch with an empty share."""
    backend = open_backend(Path(job["model"]), placement, **job["changes"])
    train(backend, range(1))
    backend.save_state(out / f"{job['name']}-state")
    straight = train(backend, range(1, 2))
    straight_on = {name: tensor.clone() for name, tensor in backend.named_tensors()}
    backend.load_state(out / f"{job['name']}-state")
    again = train(backend, range(1, 2))
    is_equal = all(bool((tensor == straight_on[name]).all()) for name, tensor in backend.named_tensors())
    # Three groups in two minibatches over two ranks: one share of the first minibatch is empty.
    few = train(backend, range(2, 3), num_groups=3)
    reduced = backend.reduce(
        {"a": 1.0 + placement.rank, "a_max": float(placement.rank)}, weight=1.0 + 2 * placement.rank
    )
    backend.close()
    return {"is_equal": is_equal and straight == again, "few": few, "reduced": reduced}


RUNS = {
    "plain": run_plain,
    "critic": run_critic,
    "resume": run_resume,
    "experts": run_experts,
    "fsdp2": run_fsdp2,
    "resharded": run_resharded,
    "guard": run_guard,
    "plain_step": run_plain_step,
    "stuck": run_stuck,
    "streamed": run_streamed,
    "publish": run_publish,
    "fetched": run_fetched,
    "gathered": run_gathered,
}


def run_jobs(rank: int, world_size: int, jobs: list[dict[str, Any]], out: Path) -> None:
    """Do the jobs one after another; write what each gave to `<name>.<rank>.json`."""
    torch.set_num_threads(1)
    for job in jobs:
        place = f"127.0.0.1:{job['port']}"
        placement = Placement(rank, world_size, place, timeout_s=60.0, secret=job["secret"])
        result = RUNS[job.get("kind", "plain")](placement, job, out)
        (out / f"{job['name']}.{rank}.json").write_text(json.dumps(result))


def fork_rank(rank: int, request: dict[str, Any]) -> int:
    """Start a rank, whose output goes to `rank.<rank>.log`; return its process id."""
    pid = os.fork()
    if pid:
        return pid
    code, out = 1, Path(request["out"])
    try:
        log = os.open(out / f"rank.{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for stream in (1, 2):
            os.dup2(log, stream)
        run_jobs(rank, request["world_size"], request["jobs"], out)
        code = 0
    except BaseException:  # the end of a process: the exit code tells, and the log says why
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def serve() -> None:
    """Answer requests until stdin is closed."""
    for line in sys.stdin:
        request = json.loads(line)
        pids = [fork_rank(rank, request) for rank in range(request["world_size"])]
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        print(json.dumps(codes), flush=True)


if __name__ == "__main__":
    serve()
