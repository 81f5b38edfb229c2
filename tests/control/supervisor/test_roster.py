"""Addresses of a run's services, and the keys that each one gets."""

from __future__ import annotations

import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from asyncrl.control.ray import head
from asyncrl.control.record.rundir import RunDir
from asyncrl.control.roster import FACTORIES, SERVERS, Roster, ServiceSpec
from asyncrl.core.config.load import dump_resolved, load_config
from asyncrl.core.config.tree import Config
from asyncrl.core.errors import AsyncrlError, ConfigError
from asyncrl.core.sockets.keys import RunKeys, make_run_keys, read_client_keys
from asyncrl.core.status.service import NUM_INDICES
from asyncrl.planner import plan

SECTIONS = {"model": {"path": "m"}, "data": {"train": "t"}, "reward": {"fn": "gsm8k"}}
OTHER_HOST = "203.0.113.77"
"""Set apart for documentation (RFC 5737): no machine has it."""


def make_roster(**launcher: object) -> Roster:
    config = Config(**SECTIONS, launcher=launcher)
    return Roster(config, Path("runs/a"), "id", Path("/tmp/sockets"), "", first_port=20_000)


def test_without_a_host_every_socket_is_a_file_in_the_runs_private_folder() -> None:
    spec = make_roster().spec("rollout.0")
    assert spec.context.addresses["buffer.0"] == "ipc:///tmp/sockets/buffer.0"
    assert all(address.startswith("ipc:///tmp/sockets/") for address in spec.context.addresses.values())


def test_with_a_host_every_server_has_an_address_of_its_own() -> None:
    roster = make_roster(host="127.0.0.1")
    addresses = roster.spec("learner.0").context.addresses
    assert addresses["buffer.0"] == "tcp://127.0.0.1:20000"
    assert len(set(addresses.values())) == len(addresses) == len(SERVERS)
    for name in SERVERS:
        assert roster.spec(name).context.bind == addresses[name]


@pytest.mark.parametrize("index", [0, 3, 64, 1023, NUM_INDICES - 1])
def test_a_receiver_stays_on_a_socket_file_of_the_node_that_it_shares_with_its_engine(index: int) -> None:
    roster = replace(make_roster(host="127.0.0.1"), keys=make_run_keys())
    engine, receiver = (roster.spec(f"{kind}.{index}").context for kind in ("rollout", "receiver"))
    address = f"ipc:///tmp/sockets/receiver.{index}"
    assert engine.addresses.keys() == {*SERVERS, receiver.name}
    assert engine.addresses[receiver.name] == receiver.bind == address
    assert engine.addresses["weight_sync.0"].startswith("tcp://127.0.0.1:")
    assert receiver.keys is not None and receiver.keys.server is not None


@pytest.mark.parametrize(("name", "kind"), [("rollout.0", "generator"), ("learner.0", "client")])
def test_a_service_that_serves_nobody_gets_no_key_of_the_servers_and_a_replica_none_of_a_service(
    name: str, kind: str
) -> None:
    keys = make_run_keys()
    context = replace(make_roster(), keys=keys).spec(name).context
    assert context.keys == RunKeys(getattr(keys, kind))


def test_a_replica_gets_no_secret_that_names_are_derived_from() -> None:
    roster = replace(make_roster(), secret="s")
    assert [roster.spec(name).context.secret for name in ("rollout.0", "receiver.0")] == ["", "s"]


@pytest.mark.parametrize("name", ["buffer.0", "weight_sync.0", "publisher.0", "receiver.0"])
def test_a_server_gets_the_servers_keys_too(name: str) -> None:
    keys = make_run_keys()
    context = replace(make_roster(), keys=keys).spec(name).context
    assert context.keys == RunKeys(keys.client, keys.server)
    assert keys.server is not None
    assert keys.server.secret.decode() not in repr(context)


@pytest.mark.parametrize(
    ("launcher", "has_curve"),
    [
        ({}, False),
        ({"curve": "on"}, True),
        ({"host": "127.0.0.1"}, False),
        ({"host": "127.0.0.1", "curve": "on"}, True),
        ({"host": OTHER_HOST}, True),
    ],
)
def test_connections_have_keys_by_themselves_where_others_could_reach_them(
    launcher: dict[str, str], has_curve: bool
) -> None:
    assert Config(**SECTIONS, launcher=launcher).launcher.has_curve is has_curve


@pytest.mark.parametrize(
    ("launcher", "line", "text"),
    [
        (f"{{host: {OTHER_HOST}, curve: off}}", 4, "launcher.curve: off with launcher.host: 203.0.113.77"),
        ("{host: 0.0.0.0}", 4, "the IPv4 address of one interface"),
        ("{host: my-host}", 4, "launcher.host"),
        ("{curve: yes}", 4, "launcher.curve"),
    ],
)
def test_an_open_door_is_a_configuration_error_with_its_place(
    tmp_path: Path, launcher: str, line: int, text: str
) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(f"model: {{path: m}}\ndata: {{train: t}}\nreward: {{fn: f}}\nlauncher: {launcher}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    (message,) = str(caught.value).splitlines()
    assert message.startswith(f"{path}:{line}:")
    assert text in message


def test_a_host_that_is_not_of_this_machine_is_found_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match=r"launcher\.host: nothing can listen on 203\.0\.113\.77"):
        plan.check(Config(**SECTIONS, launcher={"host": OTHER_HOST}))


def test_the_ports_of_every_service_that_there_can_be_are_held_for_the_run() -> None:
    with head._held_ports("127.0.0.1") as first:
        for port in range(first, first + len(SERVERS)):
            with socket.socket() as other, pytest.raises(OSError, match="in use"):
                other.bind(("127.0.0.1", port))
    with head._held_ports(None) as first:
        assert first == 0
    with pytest.raises(AsyncrlError, match=OTHER_HOST), head._held_ports(OTHER_HOST):
        pass


def test_a_start_makes_new_keys_and_one_without_removes_those_of_the_last(tmp_path: Path) -> None:
    run_dir, config = RunDir(tmp_path), Config(**SECTIONS, launcher={"curve": "on"})
    first, second = head._make_keys(config, run_dir), head._make_keys(config, run_dir)
    assert first is not None
    assert second is not None
    assert first.client.secret != second.client.secret
    assert first.client.server != second.client.server
    assert read_client_keys(run_dir.keys) == second.generator
    assert read_client_keys(run_dir.service_keys) == second.client
    assert second.client.secret.decode() not in dump_resolved(config)
    assert head._make_keys(Config(**SECTIONS), run_dir) is None
    assert not run_dir.keys.exists() and not run_dir.service_keys.exists()


def test_a_service_may_have_as_many_connections_as_its_machine_allows() -> None:
    code = (
        "import resource; from asyncrl.control.ray import host\n"
        "hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))\n"
        "host._raise_descriptor_limit()\n"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE)[0], hard, host.MAX_DESCRIPTORS)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    soft, hard, largest = map(int, done.stdout.split())
    assert soft == (min(hard, largest) if hard >= 0 else largest)


ON_GPUS = {"learner": {"gpus": 1, "cpus": 4.5}, "rollout": {"gpus": 1, "cpus": 2}}


@pytest.mark.parametrize("kind", sorted({*FACTORIES} - {"learner", "rollout"}))
def test_a_service_that_has_no_gpu_in_the_plan_sees_none(kind: str) -> None:
    """Ray shows an actor that asks for none every GPU of its node."""
    roster = replace(make_roster(), config=Config(**SECTIONS, **ON_GPUS))
    assert roster.spec(f"{kind}.0").variables["CUDA_VISIBLE_DEVICES"] == ""


def test_the_supervisor_whose_specification_the_head_makes_sees_no_gpu() -> None:
    context = make_roster().spec("buffer.0").context
    spec = ServiceSpec("module:function", replace(context, name="supervisor.0"), "log")
    assert spec.variables == {"CUDA_VISIBLE_DEVICES": ""}


@pytest.mark.parametrize("section", ["learner", "rollout"])
def test_a_learner_and_a_replica_see_the_gpus_that_they_ask_for(section: str) -> None:
    """And compute copies and digests on as many threads as they have cores."""
    with_gpu = replace(make_roster(), config=Config(**SECTIONS, **ON_GPUS)).spec(f"{section}.0").variables
    assert "CUDA_VISIBLE_DEVICES" not in with_gpu
    assert with_gpu["OMP_NUM_THREADS"] == {"learner": "4", "rollout": "2"}[section]
    without = replace(make_roster(), config=Config(**SECTIONS)).spec(f"{section}.0").variables
    assert without["CUDA_VISIBLE_DEVICES"] == "" and "OMP_NUM_THREADS" not in without


@pytest.mark.parametrize("section", ["learner", "rollout"])
def test_a_share_of_a_gpu_is_reserved_as_it_is_and_its_owner_sees_the_gpu(section: str) -> None:
    sides = {"learner": {"gpus": 0.4}, "rollout": {"gpus": 0.4}}
    spec = replace(make_roster(), config=Config(**SECTIONS, **sides)).spec(f"{section}.0")
    assert spec.gpus == 0.4 and "CUDA_VISIBLE_DEVICES" not in spec.variables


@pytest.mark.parametrize(("backend", "connections"), [("megatron", "1"), ("fsdp2", None)])
def test_a_learner_on_a_gpu_has_the_environment_of_its_backend(backend: str, connections: str | None) -> None:
    config = Config(**SECTIONS, learner={"gpus": 1, "backend": backend})
    environment = replace(make_roster(), config=config).spec("learner.0").environment
    assert environment["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert environment["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "3", "else a hung peer holds a rank for ever"
    assert environment["TORCH_NCCL_BLOCKING_WAIT"] == "0"
    assert environment.get("CUDA_DEVICE_MAX_CONNECTIONS") == connections


@pytest.mark.parametrize("gpus", [0, 1])
@pytest.mark.parametrize("is_deterministic", [False, True])
def test_libraries_of_a_learner_on_a_gpu_repeat_their_results_where_that_is_asked_for(
    gpus: int, is_deterministic: bool
) -> None:
    """Before the process imports anything: they read it once."""
    config = Config(
        **SECTIONS, learner={"gpus": gpus, "deterministic": is_deterministic}, rollout={"gpus": 1}
    )
    roster = replace(make_roster(), config=config)
    variables = roster.spec("learner.0").variables
    wanted = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring"} if gpus and is_deterministic else {}
    assert {
        name: variables[name] for name in ("CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO") if name in variables
    } == wanted
    assert not {"CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO"} & roster.spec("rollout.0").variables.keys()


@pytest.mark.parametrize("mode", ["1", "0", None])
@pytest.mark.parametrize("settings", [{}, ON_GPUS])
def test_replicas_are_told_of_the_deterministic_mode_that_the_run_was_started_in(
    settings: dict[str, Any], mode: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that joined Ray has an environment of its own."""
    monkeypatch.delenv("VLLM_BATCH_INVARIANT", raising=False)
    if mode is not None:
        monkeypatch.setenv("VLLM_BATCH_INVARIANT", mode)
    roster = replace(make_roster(), config=Config(**SECTIONS, **settings))
    assert roster.spec("rollout.0").variables.get("VLLM_BATCH_INVARIANT") == ("1" if mode == "1" else None)
    assert "VLLM_BATCH_INVARIANT" not in roster.spec("learner.0").variables
