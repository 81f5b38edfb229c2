"""Registry of rewards: resolves `reward.fn` to functions by name or file, a model, a server, or their sum.

Invariant: all that can be known to be wrong before a process is started is a ConfigError here.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from asyncrl.core.config.reading.problems import suggest
from asyncrl.core.config.tree import RewardPart, RewardSection
from asyncrl.core.errors import ConfigError, WireError
from asyncrl.core.experience import CUT_REASONS, MAX_REWARD_PARTS, check_reward
from asyncrl.core.states import Reason
from asyncrl.core.variants import RewardFacts, function
from rollout_service.declared import find_definition, parse, returns_nothing, stand_in
from rollout_service.rewards.calling import BoundFunction, FunctionReward
from rollout_service.rewards.score import Answer, Part
from rollout_service.rewards.served.judge import JudgeReward, JudgeSettings
from rollout_service.rewards.served.messages import ModelSettings
from rollout_service.rewards.served.model import ModelReward
from rollout_service.rewards.served.pool import PooledReward
from rollout_service.rewards.served.remote import RemoteReward, RemoteSettings
from rollout_service.rewards.total import ErrorRate, TotalReward, Weighed
from rollout_service.rewards.variants import REWARDS

OF_POOL = ("workers", "deadline_s")
"""Arguments of a part that are not its function's."""
Arguments = dict[str, object]


def load_reward(reward: RewardSection, folder: Path = Path(), run_dir: Path | None = None) -> TotalReward:
    """Return the reward of a run; nothing is started yet.

    Args:
        folder: Base of relative paths of files.
        run_dir: Where judges count what they spend; None counts it in this process.

    Raises:
        ConfigError: There is no such reward, or it does not take its arguments.
    """
    parts = build_parts(reward.fn, folder)
    for weighed in parts:
        if run_dir is not None and isinstance(weighed.part, JudgeReward):
            weighed.part.count_in(run_dir)
    return TotalReward(parts, ErrorRate(reward.max_error_rate))


def build_parts(entries: Sequence[RewardPart], folder: Path = Path()) -> list[Weighed]:
    """Return the parts, each under a name of its own. Raises ConfigError."""
    parts = [Weighed(build_part(entry, folder), entry.weight, _explainer(entry.fn)) for entry in entries]
    names = [weighed.part.name for weighed in parts]
    for name in names:
        _check_name(name)
        if names.count(name) > 1:
            raise ConfigError(f"two rewards are called '{name}'", hint="Give one of them a `name`")
    if len(names) > MAX_REWARD_PARTS:
        raise ConfigError(f"{len(names)} rewards are more than the {MAX_REWARD_PARTS} that fit into a group")
    return parts


def build_part(entry: RewardPart, folder: Path) -> Part:
    """Return one part. Raises ConfigError."""
    fn, arguments = entry.fn, entry.arguments
    if is_url := fn.startswith(("http://", "https://")):
        _check_url(fn)
    if isinstance(base_url := arguments.get("base_url"), str) and fn in REWARDS:
        _check_url(base_url)
    name = entry.name or default_name(fn)
    if fn in REWARDS:
        return _registered(name, entry, REWARDS[fn])
    if is_url:
        return _with_settings(name, {"url": fn, **arguments}, RemoteReward, RemoteSettings)
    file, separator, attribute = fn.rpartition(":")
    if not separator or not file.endswith(".py"):
        known = sorted(REWARDS)
        hint = suggest(fn, known) or f"Use one of {', '.join(known)}; or file.py:function, or a URL"
        if fn.endswith(".py"):
            hint = f"Name the function too: {fn}:FUNCTION"
        raise ConfigError(f"there is no reward '{fn}'", hint=hint)
    if not (folder / file).is_file():
        raise ConfigError(f"the reward file {folder / file} does not exist")
    return _served(name, arguments, PooledReward, function=f"{(folder / file).absolute()}:{attribute}")


def _registered(name: str, entry: RewardPart, facts: RewardFacts) -> Part:
    arguments = entry.arguments
    if facts.is_judge:
        return _with_settings(name, arguments, JudgeReward, JudgeSettings, ("deadline_s",))
    if facts.has_model:
        return _with_settings(name, arguments, ModelReward, ModelSettings)
    if facts.part:
        try:
            part: Part = function(facts.part)(name, **arguments)
        except TypeError as error:
            raise ConfigError(f"the reward '{name}' does not take its arguments: {error}") from error
        return part
    has_form = bool(facts.forms) and arguments.get("pattern", facts.forms[0]) in facts.forms
    if has_form or not facts.is_pooled:
        return FunctionReward(name, function(facts.function), arguments, is_closed=True)
    if facts.forms:  # an expression of the user's may take for ever on a response
        _check_expression(entry.fn, arguments.get("pattern"), facts.forms)
    return _served(name, arguments, PooledReward, function=facts.function)


def _explainer(fn: str) -> Callable[[Answer], Reason] | None:
    """Return why a registered rule gives zero: a rule that returns has read the answer, and it is wrong."""
    facts = REWARDS.get(fn)
    if facts is None or not (facts.function or facts.part):
        return None
    find = function(facts.answer) if facts.answer and not facts.is_pooled else None

    def explain(answer: Answer) -> Reason:
        if answer.finish_reason in CUT_REASONS:
            return Reason.TRUNCATED
        has_none = find is not None and find(answer.response) is None
        return Reason.NO_ANSWER if has_none else Reason.WRONG

    return explain


def check_file(entry: RewardPart) -> None:
    """Return unless the function of a file is written so that no call can work; the file is not run.

    Raises:
        ConfigError: It does not take its arguments, wants others, or returns nothing.
    """
    file, _, attribute = entry.fn.rpartition(":")
    definition = find_definition(parse(Path(file)), attribute)
    if not isinstance(definition, ast.FunctionDef):
        return
    name = entry.name or default_name(entry.fn)
    arguments = {key: value for key, value in entry.arguments.items() if key not in OF_POOL}
    BoundFunction(name, stand_in(definition), arguments)
    if returns_nothing(definition):
        raise ConfigError(f"the reward '{name}' returns no number", hint="It has no `return` with a value")


def default_name(fn: str) -> str:
    """Return what a part is called in metrics: the registered name, the function's, or the server's.

    >>> default_name("rewards/mine.py:score"), default_name("https://judge.example:8000/v1")
    ('score', 'judge.example:8000')
    """
    if "://" in fn:
        found = urlsplit(fn)
        return f"{found.hostname}:{found.port}" if found.port else str(found.hostname)
    return fn.rpartition(":")[2]


def _check_url(url: str) -> None:
    try:
        _ = urlsplit(url).port
    except ValueError:  # its message may hold a password
        raise ConfigError("the URL of a reward has no host and port that can be reached") from None


def _check_name(name: str) -> None:
    try:
        check_reward(0.0, {name: 0.0})
    except WireError as error:
        what = f"a reward cannot be called {name!a}: {error.message}"
        raise ConfigError(what, hint="Give it a shorter `name`") from error


def _served(name: str, arguments: Arguments, make: Callable[..., Part], function: str) -> Part:
    """Return a pooled part; `workers` and `deadline_s` are the pool's, the rest the function's."""
    of_pool: Arguments = {key: arguments[key] for key in OF_POOL if key in arguments}
    of_function = {key: value for key, value in arguments.items() if key not in of_pool}
    _check_limits(name, of_pool)
    return make(name, function, of_function, **of_pool)


def _with_settings(
    name: str,
    arguments: Arguments,
    make: Callable[..., Part],
    settings: Callable[..., ModelSettings | RemoteSettings | JudgeSettings],
    limits: Sequence[str] = ("batch", "deadline_s"),
) -> Part:
    """Return a part with settings of its own; `limits` are the part's."""
    of_part: Arguments = {key: arguments[key] for key in limits if key in arguments}
    _check_limits(name, of_part)
    told = {key: value for key, value in arguments.items() if key not in of_part}
    known = inspect.signature(settings).parameters
    for key in told:
        if key not in known:
            raise ConfigError(
                f"the reward '{name}' takes no argument '{key}'", hint=f"It takes {', '.join(known)}"
            )
    for key, parameter in known.items():
        if parameter.default is parameter.empty and not isinstance(told.get(key), str):
            raise ConfigError(f"the reward '{name}' needs '{key}', a text")
    return make(name, settings(**told), **of_part)


def _check_limits(name: str, limits: Mapping[str, object]) -> None:
    for key, value in limits.items():
        kinds = (int, float) if key == "deadline_s" else (int,)
        if isinstance(value, bool) or not isinstance(value, kinds) or value <= 0:
            raise ConfigError(f"'{key}' of the reward '{name}' must be a number above 0, not {value!r}")


def _check_expression(fn: str, pattern: object, forms: Sequence[str]) -> None:
    try:
        if not isinstance(pattern, str):
            raise TypeError("first argument must be string or compiled pattern")
        re.compile(pattern)
    except (re.error, TypeError) as error:
        hint = f"Use {' or '.join(forms)}, or a regular expression"
        raise ConfigError(
            f"the pattern {pattern!r} of the reward '{fn}' is no regular expression: {error}", hint=hint
        ) from error
