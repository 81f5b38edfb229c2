"""Turning what a configuration names into files on this machine, once, before anything starts.

`builtin:NAME` is made on first use and kept under `<run.dir>/builtin`; a hub id is fetched once and
pinned to the revision that was found.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from asyncrl.config.tree import Config
from asyncrl.errors import ConfigError

BUILTIN = "builtin:"
BUILTINS = {"digit_sort": "rollout_service.tasks.digit_sort", "tiny_text": "rollout_service.tasks.tiny_text"}
MAKE_DEADLINE_S = 900.0
_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*/[\w.-]+$")


def is_builtin(path: str) -> bool:
    """Tell whether `path` names something that is made here."""
    return path.startswith(BUILTIN)


def is_hub_id(path: str) -> bool:
    """Tell whether `path` reads as `owner/name` and names no folder here."""
    return _HUB_ID.match(path) is not None and not Path(path).exists()


def hub_folder(hub_id: str) -> str:
    """Return the name of the folder in which the hub's cache keeps a model."""
    return f"models--{hub_id.replace('/', '--')}"


def prepare(config: Config, say: Callable[[str], None]) -> Config:
    """Return `config` with every path resolved to an existing absolute one.

    Args:
        say: Told, in a sentence, about work that takes time.

    Raises:
        ConfigError: An unknown builtin, or a hub id that cannot be fetched.
    """
    root = Path(config.run.dir).absolute() / "builtin"
    model, revision = _resolve_model("model.path", config.model.path, config.model.revision, root, say)
    critic, critic_revision = config.critic.path, config.critic.revision
    if critic is not None:
        critic, critic_revision = _resolve_model("critic.path", critic, critic_revision, root, say)
    data = {
        name: None if path is None else _resolve_data(name, path, root, say)
        for name, path in (("train", config.data.train), ("eval", config.data.eval))
    }
    return config.model_copy(
        update={
            "run": config.run.model_copy(update={"dir": str(Path(config.run.dir).absolute())}),
            "model": config.model.model_copy(update={"path": model, "revision": revision}),
            "critic": config.critic.model_copy(update={"path": critic, "revision": critic_revision}),
            "data": config.data.model_copy(update=data),
            "reward": config.reward.model_copy(update={"fn": _resolve_reward(config.reward.fn)}),
        }
    )


def make_builtin(path: str, root: Path, say: Callable[[str], None]) -> Path:
    """Make a built-in model and its data unless they are there; return their folder."""
    name = path.removeprefix(BUILTIN)
    if name not in BUILTINS:
        raise ConfigError(f"there is no '{path}'", hint=f"Known are {', '.join(sorted(BUILTINS))}")
    folder = root / name
    if not folder.exists():
        say(f"making {path} in {folder} (once, about a minute)")
    made = subprocess.run(
        [sys.executable, "-m", BUILTINS[name], str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=MAKE_DEADLINE_S,
    )
    if made.returncode:
        raise ConfigError(f"making {path} failed:\n{made.stdout[-2000:]}")
    return folder


def _resolve_model(
    key: str, path: str, revision: str | None, root: Path, say: Callable[[str], None]
) -> tuple[str, str | None]:
    """Return the folder of a model and its revision: the one found, if it was fetched."""
    if is_builtin(path):
        return str(make_builtin(path, root, say).absolute()), revision
    if is_hub_id(path):
        say(f"fetching {path}")
        return fetch(path, revision, key)
    return str(Path(path).absolute()), revision


def _resolve_data(name: str, path: str, root: Path, say: Callable[[str], None]) -> str:
    if is_builtin(path):
        return str(make_builtin(path, root, say) / f"{name}.parquet")
    return str(Path(path).absolute())


def _resolve_reward(fn: str) -> str:
    file, separator, function = fn.rpartition(":")
    return f"{Path(file).absolute()}:{function}" if separator else fn


def fetch(hub_id: str, revision: str | None, key: str = "model.path") -> tuple[str, str]:
    """Fetch a model from the hub once; return its folder and the revision that was found.

    Raises:
        ConfigError: It cannot be fetched; `key` is what names it.
    """
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(hub_id, revision=revision)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{key}: '{hub_id}' is no folder here and could not be fetched from the hub: {error}",
            hint="Name a folder, or check the network",
        ) from error
    return folder, Path(folder).name
