"""Preparation of a run: resolves names in a configuration to files on this machine, once, before the start.

`builtin:NAME` is put there on first use and kept under `<run.dir>/builtin`; a hub id is fetched once and
pinned to the revision that was found.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from pathlib import Path

from asyncrl.core.config.tree import Config, RewardPart, RolloutSection
from asyncrl.core.errors import ConfigError, DataError
from asyncrl.core.runtime.faults import fault_point
from asyncrl.core.variants import rewards
from asyncrl.planner.plan.sources import resolve_function, resolve_sources

BUILTIN = "builtin:"
BUILTINS = {
    "digit_sort": "rollout_service.tasks.digit_sort.folder",
    "tiny_text": "rollout_service.tasks.tiny_text",
    "tool_product": "rollout_service.tasks.tool_product.folder",
}
"""Modules with a `make_folder`."""
MODEL_FILE = "config.json"
_HUB_ID = re.compile(r"([A-Za-z0-9][\w.-]*/[\w.-]+)(?:@([\w./-]+))?")


def builtin_root(config: Config) -> Path:
    """Return the folder that a run's built-in models and data are put into."""
    return Path(config.run.dir).absolute() / "builtin"


def is_builtin(path: str) -> bool:
    """Tell whether `path` names something that is made here."""
    return path.startswith(BUILTIN)


def is_model(path: str) -> bool:
    """Tell whether `path` names a model that is here or made here, and not a run."""
    return is_builtin(path) or (Path(path) / MODEL_FILE).is_file()


def is_hub_id(path: str) -> bool:
    """Tell whether `path` reads as `owner/name` or `owner/name@revision` and names no folder here."""
    return _HUB_ID.fullmatch(path) is not None and not Path(path).exists()


def split_revision(hub_id: str) -> tuple[str, str | None]:
    """Return what stands before and behind the `@` of a hub id."""
    found = _HUB_ID.fullmatch(hub_id)
    assert found is not None, "is_hub_id said so"
    return found[1], found[2]


def pin_revision(hub_id: str, folder: str) -> str:
    """Return `hub_id` with the revision of `folder`, if it was fetched for this id and the id names none.

    >>> pin_revision("owner/name", "/hub/models--owner--name/snapshots/abc")
    'owner/name@abc'
    """
    name, revision = split_revision(hub_id)
    cached = (f"models--{name.replace('/', '--')}", "snapshots")  # and in it a folder per commit
    is_of_it = Path(folder).parts[-3:-1] == cached
    return f"{name}@{Path(folder).name}" if revision is None and is_of_it else hub_id


def reward_model(part: RewardPart) -> str | None:
    """Return the path of a reward's own model, None if it has none."""
    facts, path = rewards().get(part.fn), part.arguments.get("path")
    return path if facts is not None and facts.has_model and isinstance(path, str) else None


def prepare(config: Config, say: Callable[[str], None]) -> Config:
    """Return `config` with every path resolved to an existing absolute one.

    Args:
        say: Told, in a sentence, about work that takes time.

    Raises:
        ConfigError: An unknown builtin, or a hub id that cannot be fetched.
    """
    root = builtin_root(config)
    model, critic = _resolve_model("model.path", config.model.path, root, say), config.critic.path
    if critic is not None:
        critic = _resolve_model("critic.path", critic, root, say)
    lora = config.model.lora
    if lora.path is not None:
        lora = lora.model_copy(update={"path": str(Path(lora.path).absolute())})
    data = resolve_sources(config.data, lambda name, path: _resolve_data(name, path, root, say))
    return config.model_copy(
        update={
            "run": config.run.model_copy(update={"dir": str(Path(config.run.dir).absolute())}),
            "model": config.model.model_copy(update={"path": model, "lora": lora}),
            "critic": config.critic.model_copy(update={"path": critic}),
            "data": data,
            "rollout": _resolve_environment(config.rollout),
            "reward": config.reward.model_copy(
                update={"fn": tuple(_resolve_reward(part, root, say) for part in config.reward.fn)}
            ),
        }
    )


def make_builtin(path: str, root: Path, say: Callable[[str], None]) -> Path:
    """Make a built-in model and its data unless they are there; return their folder."""
    name = path.removeprefix(BUILTIN)
    if name not in BUILTINS:
        raise ConfigError(f"there is no '{path}'", hint=f"Known are {', '.join(sorted(BUILTINS))}")
    folder = root / name
    if not folder.exists():
        say(f"making {path} in {folder} (once)")
        fault_point("up.making")
    try:
        made: Path = importlib.import_module(BUILTINS[name]).make_folder(folder)
    except (OSError, DataError) as error:
        raise ConfigError(f"making {path} in {folder} failed: {error}") from error
    return made


def _resolve_model(key: str, path: str, root: Path, say: Callable[[str], None]) -> str:
    """Return the folder of a model; that of a fetched one is named by its commit."""
    if is_builtin(path):
        return str(make_builtin(path, root, say).absolute())
    if is_hub_id(path):
        say(f"fetching {path}")
        fault_point("up.fetching")
        return fetch(path, key)
    return str(Path(path).absolute())


def _resolve_data(name: str, path: str, root: Path, say: Callable[[str], None]) -> str:
    if is_builtin(path):
        return str(make_builtin(path, root, say) / f"{name}.parquet")
    return str(Path(path).absolute())


def _resolve_reward(part: RewardPart, root: Path, say: Callable[[str], None]) -> RewardPart:
    """Return `part` with the file of its function, or the folder of its model, as it is found here."""
    path = reward_model(part)
    if path is not None:
        folder = _resolve_model("reward.fn", path, root, say)
        return RewardPart.model_validate(part.model_dump() | {"path": folder})
    file, separator, function = part.fn.rpartition(":")
    if not separator or "://" in part.fn:
        return part
    return part.model_copy(update={"fn": f"{Path(file).absolute()}:{function}"})


def _resolve_environment(rollout: RolloutSection) -> RolloutSection:
    if rollout.environment is None:
        return rollout
    name = resolve_function(rollout.environment.name)
    return rollout.model_copy(update={"environment": rollout.environment.model_copy(update={"name": name})})


def fetch(hub_id: str, key: str = "model.path") -> str:
    """Fetch a model from the hub once; return its folder, which is named by the commit that was found.

    Raises:
        ConfigError: It cannot be fetched; `key` is what names it.
    """
    from huggingface_hub import snapshot_download

    name, revision = split_revision(hub_id)
    try:
        return str(snapshot_download(name, revision=revision))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{key}: '{hub_id}' is not a folder here and could not be fetched from the hub: {error}",
            hint="Name a folder, or check the network",
        ) from error
