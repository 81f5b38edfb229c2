"""deploy/: what it names is there. Neither Slurm nor Kubernetes nor Docker is started here."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
import tomllib
import venv
from pathlib import Path

import pytest
import set_up
import typer.main
from pip_settings import read_pip_settings, uv_environment
from ruamel.yaml import YAML

from asyncrl.cli.app import app
from asyncrl.core.config.load import load_config
from asyncrl.planner.plan.footprint import shared_memory
from asyncrl.planner.plan.machine import count_receivers_here
from configs import shipped

DEPLOY = Path("deploy")
SLURM = DEPLOY / "slurm.sbatch"
MANIFESTS = list(YAML(typ="safe").load_all((DEPLOY / "kuberay.yaml").read_text()))
DOCKERFILES = sorted(DEPLOY.glob("Dockerfile.*"))
PLACES = [*DEPLOY.iterdir(), Path("docs/cluster.md")]


def lines_of(path: Path) -> list[str]:
    """Return the lines of `path`, those that go on joined."""
    return path.read_text().replace("\\\n", " ").splitlines()


def calls(pattern: str) -> list[tuple[str, list[str]]]:
    """Return where a command is called, and the words after it, up to the end of the command."""
    lines = [(path, line) for path in PLACES for line in lines_of(path) if not line.startswith("#SBATCH")]
    found = []
    for path, line in lines:
        for match in re.finditer(pattern + r"\s+([^`\n;&|)]*)", line):
            words = match[1].partition(" # ")[0].replace('"', " ").split()
            found.append((f"{path}: {line.strip()[:80]}", words))
    return found


def manifest(kind: str) -> dict:
    """Return the first one of a kind."""
    return next(one for one in MANIFESTS if one["kind"] == kind)


def groups() -> list[dict]:
    spec = manifest("RayCluster")["spec"]
    return [spec["headGroupSpec"], *spec["workerGroupSpecs"]]


def test_the_batch_file_is_a_shell_script():
    assert subprocess.run(["bash", "-n", str(SLURM)], check=False, timeout=60.0).returncode == 0
    options = [line for line in SLURM.read_text().splitlines() if line.startswith("#SBATCH")]
    assert all(re.fullmatch(r"#SBATCH --[a-z-]+(=\S+)?", line) for line in options)
    assert "set -euo pipefail" in SLURM.read_text()


SRUN = """
import signal, subprocess, sys
def interrupt(*_):
    if "--disable-status" in sys.argv:
        task.send_signal(signal.SIGINT)
    else:
        print("srun: interrupt (one more within 1 sec to abort)")
signal.signal(signal.SIGINT, interrupt)
signal.signal(signal.SIGTERM, lambda *_: task.kill())
words = iter(sys.argv[1:])
command = next(word for word in words if not word.startswith("--"))
task = subprocess.Popen([command, *words])
sys.exit(task.wait())
"""
"""As srun's manual has it: a first SIGINT shows the tasks' state, and with --disable-status goes to them."""
COMMANDS = {
    "srun": f"#!{sys.executable} -IS\n{SRUN}",
    "scontrol": "#!/bin/bash\necho node1\n",
    "python": "#!/bin/bash\n",
    "ray": '#!/bin/bash\necho "$RAY_AUTH_MODE" "$(stat -c "%a %s" "$RAY_AUTH_TOKEN_PATH")"\nexec sleep 30\n',
    "asyncrl": '#!/bin/bash\ntrap "echo checkpoint; exit 130" INT\n'
    "sleep 0.3; echo up > started\nfor _ in {1..300}; do sleep 0.05; done\n",
}


def test_the_signal_before_the_end_of_the_batch_reaches_the_run_and_its_exit_code_is_the_jobs(tmp_path):
    bin_folder = tmp_path / ".venv" / "bin"
    bin_folder.mkdir(parents=True)
    for name, text in COMMANDS.items():
        (bin_folder / name).write_text(text)
        (bin_folder / name).chmod(0o755)
    given = {"SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_NODELIST": "node1"}
    # What a shell starts in the background ignores SIGINT, and a shell cannot undo that.
    batch = subprocess.Popen(
        ["env", "--default-signal=INT", "bash", str(SLURM.absolute()), "cluster.yaml"],
        env={"PATH": f"{bin_folder}:{os.environ['PATH']}"} | given,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        while not (tmp_path / "started").exists():
            assert batch.poll() is None
            time.sleep(0.02)
        batch.send_signal(signal.SIGINT)
        said, _ = batch.communicate(timeout=30)
    finally:
        if batch.poll() is None:
            os.killpg(batch.pid, signal.SIGKILL)
            batch.wait()
    assert said.splitlines() == ["token 600 64", "checkpoint"] and batch.returncode == 130
    assert list(tmp_path.glob(".ray_token*")) == [], "Ray's token went with the job"


def test_every_command_of_asyncrl_that_is_named_exists_with_its_options():
    commands = typer.main.get_command(app).commands
    named = calls(r"(?<![\w/.:-])asyncrl(?= (?:up|scale|status|down|plan|logs)\b[^'])")
    assert len(named) >= 6
    for where, words in named:
        assert words[0] in commands, where
        known = {option for parameter in commands[words[0]].params for option in parameter.opts}
        given = [word.partition("=")[0] for word in words[1:] if re.match(r"--?[a-z]", word)]
        assert set(given) <= known | {"-it"}, where


@pytest.mark.filterwarnings("ignore")  # what Ray imports for its command line
def test_every_option_of_ray_that_is_named_exists():
    from ray.scripts import scripts

    named = [(where, words) for where, words in calls(r"\bray(?= start| stop)") if words]
    assert len(named) >= 5
    for where, words in named:
        command = scripts.cli.commands[words[0]]
        known = {option for parameter in command.params for option in parameter.opts}
        given = {word.partition("=")[0] for word in words[1:] if word.startswith("--")}
        assert given <= known, where
    start = {option for parameter in scripts.start.params for option in parameter.opts}
    for group in groups():
        assert {f"--{name}" for name in group["rayStartParams"]} <= start


def test_every_module_that_is_named_can_be_found():
    text = "\n".join(path.read_text() for path in PLACES)
    modules = set(re.findall(r"python -m ([\w.]+)", text))
    assert modules == {"asyncrl.cli.run.wait_for_nodes"}
    assert all(Path(*module.split(".")).with_suffix(".py").is_file() for module in modules)


def test_the_cluster_of_the_manifest_is_one_that_ray_and_asyncrl_take(tmp_path):
    pinned = re.search(r"^ray==(\S+)", Path("requirements/gpu.txt").read_text(), re.MULTILINE)
    assert manifest("RayCluster")["spec"]["rayVersion"] == pinned[1]
    (tmp_path / "cluster.yaml").write_text(manifest("ConfigMap")["data"]["cluster.yaml"])
    config = load_config(tmp_path / "cluster.yaml")
    head, rollouts = groups()
    assert config.launcher.ray == "auto"
    gpus = [
        int(group["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"])
        for group in (head, rollouts)
    ]
    assert gpus[0] == config.learner.num_ranks * config.learner.gpus
    assert gpus[1] * rollouts["replicas"] == config.rollout.replicas.start * config.rollout.gpus


def test_every_mount_of_the_manifest_has_its_volume_and_every_claim_is_made():
    for group in groups():
        spec = group["template"]["spec"]
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        (container,) = spec["containers"]
        assert {mount["name"] for mount in container["volumeMounts"]} == set(volumes)
        assert (
            volumes["runs"]["persistentVolumeClaim"]["claimName"]
            == manifest("PersistentVolumeClaim")["metadata"]["name"]
        )
        assert volumes["config"]["configMap"]["name"] == manifest("ConfigMap")["metadata"]["name"]
        assert volumes["shm"]["emptyDir"]["medium"] == "Memory"


def test_the_images_user_can_write_to_what_is_mounted():
    pods = [group["template"]["spec"] for group in groups()]
    for text in [path.read_text() for path in DOCKERFILES]:
        (uid,) = re.findall(r"useradd .*--uid (\d+) asyncrl", text)
        names = ("runAsUser", "runAsGroup", "fsGroup")
        assert all([pod["securityContext"][name] for name in names] == 3 * [int(uid)] for pod in pods)
        # A volume that Docker makes takes over whose the image's folder is; a folder that it makes is root's.
        assert "mkdir -p /asyncrl/runs && chown -R asyncrl:asyncrl /asyncrl\n" in text
    mounts = [words for path in PLACES for words in re.findall(r"docker run.* -v (\S+)", path.read_text())]
    assert mounts == 3 * ["runs:/asyncrl/runs"]


def test_no_secret_is_typed_into_a_command():
    assert not [path for path in PLACES if "--from-literal" in path.read_text()]


def test_strangers_cannot_reach_the_pods():
    policy = manifest("NetworkPolicy")["spec"]
    labels = policy["podSelector"]["matchLabels"]
    assert policy["ingress"] == [{"from": [{"podSelector": {"matchLabels": labels}}]}]
    assert all(group["template"]["metadata"]["labels"] == labels for group in groups())


def test_the_pods_reach_each_other_names_and_the_hub_alone():
    private, hub = [one["spec"] for one in MANIFESTS if one["kind"] == "NetworkPolicy"]
    labels = private["podSelector"]["matchLabels"]
    assert set(private["policyTypes"]) == {"Ingress", "Egress"}
    peers, names = private["egress"]
    assert peers == {"to": [{"podSelector": {"matchLabels": labels}}]}
    assert {port["port"] for port in names["ports"]} == {53} and names["to"]
    assert hub["podSelector"]["matchLabels"] == {**labels, "ray.io/node-type": "head"}
    assert hub["egress"] == [{"ports": [{"protocol": "TCP", "port": 443}]}]


def test_the_pods_keep_the_restricted_standard():
    """Kubernetes' Pod Security standard, of the fields that such pods have."""
    for group in groups():
        pod = group["template"]["spec"]
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
        kinds = {kind for volume in pod["volumes"] for kind in volume if kind != "name"}
        assert kinds <= {"configMap", "emptyDir", "persistentVolumeClaim"}
        (container,) = pod["containers"]
        restricted = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
        assert container["securityContext"] == restricted
        assert "ports" not in container or not any("hostPort" in port for port in container["ports"])


def test_a_pod_of_replicas_has_no_secret_of_the_learners_pod():
    head, rollouts = [
        {source["secretRef"]["name"] for source in group["template"]["spec"]["containers"][0]["envFrom"]}
        for group in groups()
    ]
    assert (head, rollouts) == ({"asyncrl-home", "asyncrl-replicas"}, {"asyncrl-replicas"})
    named = set(re.findall(r"create secret generic (\S+)", (DEPLOY / "kuberay.yaml").read_text()))
    assert named == head | {"asyncrl-ray"}, "each is made by a command that the file names"


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_the_base_of_an_image_can_be_named_by_its_digest(path):
    steps = [line for line in lines_of(path) if line and not line.startswith("#")]
    assert steps[0].startswith("ARG BASE=") and steps[1] == "FROM ${BASE}"
    assert "--build-arg BASE=python:3.11-slim-bookworm@sha256:" in path.read_text()


def test_ray_in_the_pods_asks_for_a_token_that_stands_in_no_file():
    for group in groups():
        (container,) = group["template"]["spec"]["containers"]
        given = {one["name"]: one for one in container["env"]}
        assert given["RAY_AUTH_MODE"]["value"] == "token"
        assert given["RAY_AUTH_TOKEN"]["valueFrom"]["secretKeyRef"] == {"name": "asyncrl-ray", "key": "token"}


def test_the_probes_ask_a_port_that_ray_was_told_to_listen_on():
    for group, name in zip(groups(), ("port", "node-manager-port"), strict=True):
        (container,) = group["template"]["spec"]["containers"]
        for probe in ("readinessProbe", "livenessProbe"):
            assert str(container[probe]["tcpSocket"]["port"]) == group["rayStartParams"][name]


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_an_image_installs_the_pinned_list_and_holds_what_the_packages_are_made_of(path):
    words = [shlex.split(line, comments=True) for line in lines_of(path)]
    steps = [line for line in words if line]
    assert ["make", "setup", f"LIST={path.suffix[1:]}"] == next(
        line[-3:] for line in steps if "setup" in line
    )
    copied = {source for line in steps if line[0] == "COPY" for source in line[2:-1]}
    assert all(Path(source).exists() for source in copied)
    packages = tomllib.loads(Path("pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]
    assert {name.rstrip("*").partition(".")[0] for name in packages["include"]} <= copied
    assert {"Makefile", "pyproject.toml", "README.md", "LICENSE", "requirements", "tools"} <= copied
    assert steps[-2:] == [["ENTRYPOINT", "[asyncrl]"], ["CMD", "[--help]"]]


def test_the_shared_memory_of_a_container_holds_the_versions_of_the_run_that_it_is_started_with():
    lines = [line for path in PLACES for line in lines_of(path) if "docker run" in line]
    found = [re.search(r"--shm-size=(\d+)g .* up (?:configs/)?(\w+)", line) for line in lines]
    assert len(found) == 3
    for size, name in (match.groups() for match in found):
        config = load_config(shipped()[name])
        need = shared_memory.count(config, count_receivers_here(config))
        if need is None:  # a built-in model, of some hundred kilobytes
            assert config.model.path.startswith("builtin:")
        else:
            assert 0 <= int(size) * 2**30 - need.num_bytes < 2**30, f"{name} takes {need.num_bytes} bytes"


def test_nothing_but_what_an_image_copies_goes_to_its_builder():
    words = [shlex.split(line, comments=True) for path in DOCKERFILES for line in lines_of(path)]
    copied = {source for line in words if line[:1] == ["COPY"] for source in line[2:-1]}
    lines = [line for line in Path(".dockerignore").read_text().splitlines() if not line.startswith("#")]
    assert lines[0] == "*" and {line[1:] for line in lines if line.startswith("!")} == copied


@pytest.mark.long
@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_the_packages_of_an_image_are_found_in_the_versions_of_its_list(path, tmp_path, capfd):
    """The commands of `make setup`, without installing; they ask the index that pip is configured with."""
    venv.create(tmp_path)
    name = path.suffix[1:]
    python = set_up.LISTS["cpu"] / "bin" / "python"
    pip = [str(python), "-m", "pip", "install", "--dry-run", *set_up.of_list("uv")]
    set_up.run(pip, dict(os.environ))
    environment = uv_environment(read_pip_settings(python), os.environ)
    capfd.readouterr()
    uv = set_up.uv_install(set_up.LISTS["cpu"], tmp_path)
    set_up.install_list([*uv, "--dry-run", *set_up.of_list(name)], environment)
    pinned = re.findall(r"^\S+==", Path(f"requirements/{name}.txt").read_text(), re.MULTILINE)
    assert f"Would install {len(pinned)} packages" in capfd.readouterr().err and len(pinned) > 100


def test_an_image_knows_no_password_and_runs_as_nobody_special():
    for path in DOCKERFILES:
        text = path.read_text()
        assert "\nUSER asyncrl\n" in text
        assert not re.search(r"(?i)(password|token|api_key)\s*=", text)
        assert "type=secret,id=pip" in text


def test_every_link_of_the_page_leads_somewhere():
    page = Path("docs/cluster.md")
    links = re.findall(r"\]\(([^)#]+)", page.read_text())
    assert links and all((page.parent / link).exists() for link in links)
    text = page.read_text()
    for name in ("Slurm", "Kubernetes", "NCCL", "images"):
        assert name in text.partition("Never run:")[2].partition("\n\n")[0], name
