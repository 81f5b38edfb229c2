"""Functions in processes: each kind of misbehaviour fails its own call, and the others go on."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from asyncrl.core.errors import ConfigError
from rollout_service.data.prompts import Prompt
from rollout_service.rewards.score import RewardError
from rollout_service.rewards.served.pool import MODULE, PooledReward, plain_answer
from rollout_service.rewards.served.processes.child import Child, ChildDied
from rollout_service.rewards.total import TotalReward, Weighed
from rollout_service.rewards.variants import REWARDS
from tests.rollout.rewards.judging import answer, judge, reward_of, score_all, write
from tests.waiting import wait_for

NEVER_MATCHED = "a" * 40
MISBEHAVING = """
import os, sys, time

def score(response, ground_truth):
    print("said by", response)
    if response == "raises":
        raise KeyError("x")
    if response == "hangs":
        time.sleep(3600)
    if response == "exits":
        sys.exit(3)
    if response == "dies":
        os._exit(4)
    if response == "naps":
        time.sleep(0.3)
    if response == "reads":
        return len(sys.stdin.read())
    return {"nan": float("nan"), "string": "1.0", "none": None}.get(response, response == ground_truth)
"""


@pytest.fixture(autouse=True)
def patience_with_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The deadline of a pool is for what never ends; on a busy machine all else may take longer."""
    ask = Child.ask

    async def ask_patiently(child: Child, request: Mapping[str, object], deadline_s: float) -> Any:
        never_ends = request.get("response") in ("hangs", NEVER_MATCHED)
        return await ask(child, request, deadline_s if never_ends else 60.0)

    monkeypatch.setattr(Child, "ask", ask_patiently)


@pytest.fixture
def misbehaving(tmp_path: Path) -> str:
    return write(tmp_path, MISBEHAVING)


def test_every_misbehaviour_fails_its_own_answer_with_its_kind_and_the_pool_goes_on(misbehaving: str):
    reward = reward_of({"fn": misbehaving, "deadline_s": 1.0}, max_error_rate=1.0)
    told = score_all(
        reward, "4", "raises", "hangs", "exits", "4", "dies", "nan", "string", "none", "5", "reads", "4"
    )
    assert told == [
        *(1.0, "raised", "timeout", "died", 1.0, "died"),
        *("not_finite", "not_a_number", "not_a_number", 0.0, 0.0, 1.0),
    ]
    counts = reward.status()
    assert counts.parts == {"score": (5, 3.0)}
    assert counts.errors == {
        "raised": 1,
        "timeout": 1,
        "died": 2,
        "not_finite": 1,
        "not_a_number": 2,
    }


def test_a_call_that_hangs_holds_nobody_up_and_its_process_is_killed_with_what_it_started(tmp_path: Path):
    body = """
import subprocess, time
def score(response, ground_truth, level):
    if response == "hangs":
        child = subprocess.Popen(["sleep", "3600"])
        open(level, "w").write(str(child.pid))
        time.sleep(3600)
    return 1.0
"""
    pid_file = tmp_path / "pid"
    settings = {"fn": write(tmp_path, body), "deadline_s": 3.0, "workers": 2, "level": str(pid_file)}
    reward = reward_of(settings, max_error_rate=1.0)

    async def work(reward: TotalReward) -> None:
        hanging = asyncio.create_task(reward.score(answer("hangs")))
        for _ in range(20):
            assert (await reward.score(answer())).value == 1.0

        with pytest.raises(RewardError, match=r"longer than 3 s \(row 7\)"):
            await hanging
        assert (await reward.score(answer())).value == 1.0

    judge(reward, work)
    found = subprocess.run(["ps", "-o", "stat=", "-p", pid_file.read_text()], capture_output=True, text=True)
    assert found.stdout.strip()[:1] in ("", "Z")


def test_what_a_process_leaves_when_it_ends_by_itself_is_ended(tmp_path: Path):
    body = """
import os, subprocess
def score(response, ground_truth, pid_file):
    child = subprocess.Popen(["sleep", "3600"])
    open(pid_file, "w").write(str(child.pid))
    os._exit(1)
"""
    pid_file = tmp_path / "pid"
    arguments = {"pid_file": str(pid_file)}
    settings = {"name": "mine", "function": write(tmp_path, body), "arguments": arguments}

    async def work() -> None:
        child = await Child.start(MODULE, settings, 60.0)
        with pytest.raises(ChildDied):
            await child.ask(plain_answer(answer()), 60.0)
        while child.is_alive:
            await asyncio.sleep(0.01)
        await child.kill()

    asyncio.run(work())
    pid = int(pid_file.read_text())
    wait_for(lambda: not is_alive(pid), "the end of what the process had started")


def test_a_caller_that_gives_up_leaves_the_pool_usable(misbehaving: str):
    reward = reward_of({"fn": misbehaving, "deadline_s": 20.0, "workers": 1})

    async def work(reward: TotalReward) -> None:
        pids = reward.child_pids()
        for _ in range(3):
            given_up = asyncio.create_task(reward.score(answer("naps")))
            await asyncio.sleep(0.1)
            given_up.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(asyncio.shield(given_up), 5.0)
        assert (await reward.score(answer("5"))).value == 0.0
        assert reward.child_pids() == pids

    judge(reward, work)


def test_ending_the_pool_ends_a_call_that_hangs(misbehaving: str):
    reward = reward_of({"fn": misbehaving, "deadline_s": 3600.0})

    async def work(reward: TotalReward) -> asyncio.Task[object]:
        hanging = asyncio.create_task(reward.score(answer("hangs")))
        await asyncio.sleep(0.1)
        hanging.cancel()
        return hanging

    judge(reward, work)


def test_a_row_that_holds_no_plain_values_is_refused(misbehaving: str):
    reward = reward_of(misbehaving)
    odd = Prompt(3, "?", object(), "", {})

    async def work(reward: TotalReward) -> None:
        with pytest.raises(RewardError, match=r"row 3 cannot be handed") as caught:
            await reward.score(answer(prompt=odd))
        assert caught.value.kind == "refused"

    judge(reward, work)


def test_a_process_ends_when_its_replica_is_killed(tmp_path: Path, misbehaving: str):
    program = f"""
import asyncio
from rollout_service.rewards.served.processes.child import Child, ChildDied
from rollout_service.rewards.served.pool import MODULE, PooledReward, plain_answer
from tests.rollout.rewards.judging import answer
async def main():
    pool = PooledReward("mine", {misbehaving!r})
    await pool.start()
    hanging = asyncio.create_task(pool.value(answer("hangs")))
    await asyncio.sleep(0.2)
    print(*pool.child_pids(), flush=True)
    await hanging
asyncio.run(main())
"""
    killed = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=os.getcwd()
    )
    assert killed.stdout is not None
    (pid,) = map(int, killed.stdout.readline().split())
    killed.kill()
    killed.wait()
    killed.stdout.close()
    wait_for(lambda: not is_alive(pid), "the end of the process")


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_math_verify_compares_mathematics_and_survives_what_never_ends():
    pool = PooledReward("math_verify", REWARDS["math_verify"].function, workers=1, deadline_s=60.0)
    reward = TotalReward([Weighed(pool)])
    told = score_all(reward, r"so \boxed{\frac{8}{2}}", "it is $4.0$", r"\boxed{5}", "none", r"\boxed{2^2}")
    assert told == [1.0, 1.0, 0.0, 0.0, 1.0]


def test_an_expression_that_takes_for_ever_is_stopped_by_the_deadline():
    reward = reward_of(
        {"fn": "format", "pattern": "(a+)+b", "deadline_s": 1.0, "workers": 1}, max_error_rate=1.0
    )
    assert score_all(reward, "aab", NEVER_MATCHED, "aaab") == [1.0, "timeout", 1.0]


def test_a_pool_whose_process_cannot_start_is_a_config_error(tmp_path: Path):
    body = "import os\nos._exit(1)\n"

    async def nothing(reward: TotalReward) -> None:
        raise AssertionError("it must not start")

    with pytest.raises(ConfigError, match="did not start"):
        judge(reward_of(write(tmp_path, body)), nothing)


TELLS_ITS_ENVIRONMENT = """
import os

def score(response, ground_truth):
    with open(response, "w") as file:
        file.write("\\n".join(f"{name}={value}" for name, value in os.environ.items()))
    return 1.0
"""


def test_a_reward_process_gets_no_secret_of_the_run_and_what_is_meant_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secrets = {
        "ASYNCRL_GATEWAY_KEY": "gateway",
        "REDIS_PASSWORD": "redis",
        "WANDB_API_KEY": "wandb",
        "HF_TOKEN": "hub",
        "ANY_OTHER": "other",
        "HTTPS_PROXY": "http://user:proxy@example.com:3128",
    }
    meant = {"REWARD_API_KEY": "judge", "HF_HOME": "/cache", "LC_ALL": "C.UTF-8"}
    for name, value in (secrets | meant).items():
        monkeypatch.setenv(name, value)
    told = tmp_path / "told"
    assert score_all(reward_of({"fn": write(tmp_path, TELLS_ITS_ENVIRONMENT)}), str(told)) == [1.0]
    found = dict(line.partition("=")[::2] for line in told.read_text().splitlines())
    assert not secrets.keys() & found.keys()
    assert meant.items() <= found.items() and "PATH" in found and "PYTHONPATH" in found
