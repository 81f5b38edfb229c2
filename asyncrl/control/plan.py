"""Checks before anything starts: what the configuration names must be there and fit the machine.

Everything that is wrong is found at once. Nothing is started or written here.
"""

from __future__ import annotations

import ast
import json
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.config.architectures import find_unsupported
from asyncrl.config.cuts import find_uneven_cuts
from asyncrl.config.tree import Config, LearnerSection
from asyncrl.control import shared_memory
from asyncrl.control.prepare import is_builtin, is_hub_id
from asyncrl.control.shared_memory import SharedMemory
from asyncrl.control.sources import check_sources, missing_function, names_of
from asyncrl.errors import ConfigError


@dataclass(frozen=True)
class Plan:
    """What a run will take.

    Attributes:
        num_processes: Services, the vLLM engine cores among them.
        num_cpus: CPU share that Ray reserves.
        num_gpus: GPUs that Ray reserves.
        weight_sync_backend: `gloo` or `nccl`.
        shared_memory: What versions on their way take, if the model's size can be told.
    """

    num_processes: int
    num_cpus: float
    num_gpus: int
    weight_sync_backend: str
    shared_memory: SharedMemory | None


def check(config: Config) -> Plan:
    """Return the plan of a run.

    Raises:
        ConfigError: With every problem found, a line each.
    """
    checks: tuple[Callable[[Config], Iterator[str]], ...] = (
        _check_models,
        _check_lengths,
        _check_data,
        _check_reward,
        _check_machine,
        _check_host,
        _check_port,
    )
    problems = [problem for check_one in checks for problem in check_one(config)]
    if problems:
        raise ConfigError("\n".join(problems))
    ranks = config.learner.num_ranks
    on_gpus = config.rollout.gpus > 0 and config.learner.gpus > 0
    return Plan(
        num_processes=4 + ranks + 3 * config.rollout.replicas,
        num_cpus=_cpus(config),
        num_gpus=_gpus(config),
        weight_sync_backend="nccl" if config.weight_sync.backend != "gloo" and on_gpus else "gloo",
        shared_memory=shared_memory.count(config),
    )


def check_replicas(config: Config, replicas: int) -> None:
    """Raise ConfigError if this machine has no room for so many rollout replicas."""
    rollout = config.rollout.model_copy(update={"replicas": replicas})
    problems = list(_check_machine(config.model_copy(update={"rollout": rollout})))
    if problems:
        raise ConfigError("\n".join(problems))


def _check_models(config: Config) -> Iterator[str]:
    """Say what is wrong with the policy's model, and with the critic's if it has one of its own."""
    named = {"model.path": config.model.path, "critic.path": config.critic.path}
    paths = {key: path for key, path in named.items() if path is not None}
    for key, path in paths.items():
        yield from _check_model(key, path, config)
    # The policy's tokenizer makes the rows that both read; the sizes of two configs differ by padding alone.
    num_tokens = _count_token_ids(config.model.path) or _vocabulary(config.model.path) or 0
    for key, path in paths.items():
        size = _vocabulary(path)
        if size is not None and size < num_tokens:
            yield (
                f"{key}: '{path}' knows {size} tokens, and the policy's tokenizer in '{config.model.path}' "
                f"has ids up to {num_tokens - 1}; choose a model of the tokenizer's family"
            )


def _check_model(key: str, path: str, config: Config) -> Iterator[str]:
    if is_builtin(path) or is_hub_id(path):
        return
    config_file = Path(path) / "config.json"
    if not config_file.exists():
        yield f"{key}: '{path}' holds no Hugging Face model (no config.json); name a folder or a hub id"
        return
    try:
        table = _read_table(config_file)
    except (OSError, ValueError, TypeError) as error:
        yield f"{key}: '{config_file}' cannot be read: {error}"
        return
    if config.learner.backend != "megatron":
        return
    for problem, hint in find_unsupported(table):
        other = ", or any other model with learner.backend: fsdp2"
        yield f"{key}: '{path}': {problem}; {hint[0].lower()}{hint[1:]}{other}"
        return
    yield from _find_uneven_cuts(table, config.learner)


def _read_table(config_file: Path) -> dict[str, Any]:
    return dict(json.loads(config_file.read_text()))


def _vocabulary(path: str) -> int | None:
    """Return how many tokens the model in the folder `path` knows, if that can be told."""
    try:
        size = _read_table(Path(path) / "config.json").get("vocab_size")
    except (OSError, ValueError, TypeError):
        return None
    return size if isinstance(size, int) else None


def _count_token_ids(path: str) -> int | None:
    """Return one more than the largest id of the tokenizer in the folder `path`, if that can be told.

    Special tokens beyond its model's vocabulary do not count: no row has them (Gemma 3's image token).
    """
    size = _vocabulary(path) or 0
    try:
        table = _read_table(Path(path) / "tokenizer.json")
        vocabulary, added = table["model"]["vocab"], table.get("added_tokens") or []
        # Unigram models list their tokens in the order of their ids, all others map tokens to ids.
        ids = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
        known = [token["id"] for token in added if token["id"] < size or not token.get("special")]
        return 1 + max((*ids, *known), default=-1)
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _check_lengths(config: Config) -> Iterator[str]:
    """A row is trained whole, on all the ranks of its copy together: cp does not make it shorter."""
    longest = config.data.max_prompt_tokens + config.rollout.max_tokens
    if longest > config.learner.max_tokens_per_microbatch:
        yield (
            f"learner.max_tokens_per_microbatch: {config.learner.max_tokens_per_microbatch} is less than a "
            f"row may have: data.max_prompt_tokens + rollout.max_tokens = {longest}; raise it to that, and "
            "learner.cp if memory does not suffice"
        )


def _find_uneven_cuts(table: dict[str, Any], learner: LearnerSection) -> Iterator[str]:
    """Say where the model of `table` cannot be cut; what `table` lacks the learner itself complains of."""
    heads = table.get("num_key_value_heads") or table.get("num_attention_heads")
    sizes = {name: table.get(name) for name in ("num_hidden_layers", "intermediate_size", "vocab_size")}
    counts = [count for count in (heads, *sizes.values()) if isinstance(count, int)]
    if len(counts) < 4:
        return
    num_heads, num_layers, intermediate_size, vocab_size = counts
    uneven = find_uneven_cuts(
        tp=learner.tp,
        pp=learner.pp,
        vpp=learner.vpp,
        num_layers=num_layers,
        num_key_value_heads=num_heads,
        intermediate_size=intermediate_size,
        vocab_size=vocab_size,
    )
    yield from (f"{problem}; {hint[0].lower()}{hint[1:]}" for problem, hint in uneven)


def _check_data(config: Config) -> Iterator[str]:
    yield from check_sources(config.data, is_builtin)
    environment = config.rollout.environment
    if environment is not None and (problem := missing_function(environment.name)):
        yield f"rollout.environment: {problem}"


def _check_reward(config: Config) -> Iterator[str]:
    for part in config.reward.fn:
        yield from _check_reward_part(part.fn)


def _check_reward_part(fn: str) -> Iterator[str]:
    file, separator, function = fn.rpartition(":")
    if not separator or "://" in fn:
        return
    if not Path(file).is_file():
        yield f"reward.fn: there is no file '{file}'"
        return
    try:
        # Parsed and not run: what it imports may need packages that only the service's process loads.
        module = ast.parse(Path(file).read_bytes(), filename=file)
    except (SyntaxError, ValueError) as error:
        yield f"reward.fn: '{file}' is no Python file: {error}"
        return
    if function not in set(names_of(module)):
        yield f"reward.fn: '{file}' defines no function '{function}'"


def _cpus(config: Config) -> float:
    ranks = config.learner.num_ranks
    return config.learner.cpus * ranks + config.rollout.cpus * config.rollout.replicas


def _gpus(config: Config) -> int:
    ranks = config.learner.num_ranks
    return config.learner.gpus * ranks + config.rollout.gpus * config.rollout.replicas


def _check_machine(config: Config) -> Iterator[str]:
    num_cpus, num_gpus = os.cpu_count() or 1, count_gpus()
    if _cpus(config) > num_cpus:
        yield (
            f"learner.cpus and rollout.cpus ask for {_cpus(config):g} CPUs, this machine has {num_cpus}; "
            "lower them or rollout.replicas"
        )
    if _gpus(config) > num_gpus:
        yield (
            f"learner.gpus and rollout.gpus ask for {_gpus(config)} GPUs, this machine has {num_gpus}; "
            "set both to 0 to run on CPU"
        )


def count_gpus() -> int:
    """Return the NVIDIA GPUs of this machine."""
    folder = Path("/proc/driver/nvidia/gpus")
    return len(list(folder.iterdir())) if folder.is_dir() else 0


def _check_host(config: Config) -> Iterator[str]:
    host = config.launcher.host
    if host is None:
        return
    with socket.socket() as probe:
        try:
            probe.bind((host, 0))
        except OSError as error:
            yield (
                f"launcher.host: nothing can listen on {host} here ({error.strerror}); "
                "name the address of an interface of this machine"
            )


def _check_port(config: Config) -> Iterator[str]:
    port = config.launcher.api_port
    if port == 0:
        return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            yield f"launcher.api_port: port {port} is in use; choose another, or 0 for any free one"
