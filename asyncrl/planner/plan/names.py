"""Checks of the names in a configuration: advantage, loss, correction, reward, environment, tool.

Owns no list of names: the registry beside the variants is asked, and none of them imports torch. Nothing of
the user's is run: files are parsed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

from asyncrl.core.config.tree import Config
from asyncrl.core.errors import ConfigError
from asyncrl.core.variants import engine_facts, function
from asyncrl.planner.plan.sources import is_file_function, missing_function, missing_import


def check_algorithm(config: Config) -> Iterator[str]:
    """Say which advantage, loss or correction is not known, and which value does nothing with them."""
    problems = list(function("learner.algorithms.validation:find_problems")(config.algorithm))
    yield from problems
    kind = config.rollout.quantization
    if kind and not problems and not function("learner.algorithms.validation:is_corrected")(config.algorithm):
        yield (
            f"rollout.quantization: with {kind} the engine's log-probs are not the learner's, and nothing "
            "corrects that; leave algorithm.correction out, or choose one with weights"
        )


def check_imports(config: Config) -> Iterator[str]:
    """Say which `module:function` of the algorithm is not there."""
    section = config.algorithm
    for key, name in (
        ("advantage", section.advantage),
        ("loss", section.loss),
        ("correction", section.correction),
    ):
        if ":" in name and not name.partition(":")[0].endswith(".py") and (problem := missing_import(name)):
            yield f"algorithm.{key}: {problem}"


def check_rewards(config: Config) -> Iterator[str]:
    """Say which reward is not known or does not take its arguments; those of files are left out."""
    build = function("rollout_service.rewards.registry:build_parts")
    named = [part for part in config.reward.fn if not is_file_function(part.fn)]
    found = [problem for part in named for problem in _refusals("reward.fn", build, [part])]
    yield from found
    if named and not found:
        yield from _refusals("reward.fn", build, named)  # what is wrong with several of them together


def check_reward_files(config: Config) -> Iterator[str]:
    """Say which reward of a file is not there, or is written so that no call can work."""
    check = function("rollout_service.rewards.registry:check_file")
    for part in config.reward.fn:
        if problem := missing_function(part.fn):
            yield f"reward.fn: {problem}"
        elif is_file_function(part.fn):
            yield from _refusals("reward.fn", check, part)


def check_environment(config: Config) -> Iterator[str]:
    """Say if the environment is not known or does not take its arguments; one of a file is left out."""
    environment = config.rollout.environment
    if environment is None or is_file_function(environment.name):
        return
    check = function("rollout_service.environments.registry:check_registered")
    yield from _refusals("rollout.environment", check, environment)


def check_environment_file(config: Config) -> Iterator[str]:
    """Say whether the class of an environment is not there, or is written so that no episode can work."""
    environment = config.rollout.environment
    if environment is None or not is_file_function(environment.name):
        return
    if problem := missing_function(environment.name):
        yield f"rollout.environment: {problem}"
        return
    check = function("rollout_service.environments.registry:check_file")
    yield from _refusals("rollout.environment", check, environment)


def check_gateway(config: Config) -> Iterator[str]:
    """Say which parser of the gateway is not known, or that anybody could reach it."""
    yield from function("rollout_service.gateway.parsers:find_problems")(config)
    if config.rollout.gateway is not None:
        read_key, host = function("rollout_service.gateway.keys:read_key"), config.launcher.host
        yield from _refusals("rollout.gateway", read_key, os.environ, host or "127.0.0.1")


def check_engines(config: Config) -> Iterator[str]:
    """Say which engine's own environment is not on this machine, where its replicas are for certain."""
    for name, of_engine in config.by_engine.items():
        if engine_facts(name).environment and not config.launcher.is_cluster:
            interpreter = function(f"rollout_service.engine.{name}.process:interpreter")
            if not os.access(python := interpreter(of_engine.rollout.engine_args), os.X_OK):
                yield f"rollout.engine: there is no {python} for {name}; 'asyncrl doctor' says how to make it"


def _refusals(key: str, check: Callable[..., object], *arguments: object) -> Iterator[str]:
    """Yield what `check` raises about `arguments`, as a line about `key`."""
    try:
        check(*arguments)
    except ConfigError as error:
        yield f"{key}: {str(error).removeprefix(key).lstrip(': ')}"
