"""Inventory of one node: the packages, models and data that a run needs. Runs on that node; home compares.

Never reads a large file whole: a model is known
by the names and sizes of its files and the text of the small ones, data by its size and its two ends.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import xxhash

from asyncrl.core.config.tree import Config
from asyncrl.core.variants import engine_facts, engine_names

ALTERNATIVES = {
    name: tuple(found.values()) for name in engine_names() if (found := engine_facts(name).distributions)
}
"""An engine -> the packages that it comes as."""
OTHERS = ("transformers", "megatron-core", "ray", "pyzmq", "msgpack", "numpy", "safetensors")
PACKAGES = ("torch", *ALTERNATIVES, *OTHERS)
"""Packages whose versions must agree: data written by one node is read or recomputed by another."""
SOURCES = ("asyncrl", "learner", "rollout_service", "weight_sync")
END_BYTES = 1 << 20
SMALL_BYTES = 1 << 20
MAX_FILES = 5_000
"""Of a folder: `data.train` may lie in one that holds much else."""


def needed_paths(config: Config) -> dict[str, str]:
    """Return the files that replicas and learner ranks read, by configuration key; every path is absolute."""
    named = {"critic.path": config.critic.path, "model.lora.path": config.model.lora.path}
    found = {"model.path": config.model.path} | {key: path for key, path in named.items() if path}
    for key, sources in (("data.train", config.data.train), ("data.eval", config.data.eval or ())):
        found |= {f"{key}.{number}": source.path for number, source in enumerate(sources)}
    for number, part in enumerate(config.reward.fn):
        file, separator, _ = part.fn.rpartition(":")
        if separator and "://" not in part.fn:
            found[f"reward.fn.{number}"] = file
    environment = config.rollout.environment
    if environment is not None and os.path.isabs(environment.name):
        found["rollout.environment"] = environment.name.rpartition(":")[0]
    # `folder/split` of a dataset is a name inside of the folder.
    return {key: _nearest(path) for key, path in found.items() if os.path.isabs(path)}


def _nearest(path: str) -> str:
    return path if os.path.exists(path) else os.path.dirname(path)


def take_inventory(paths: tuple[str, ...]) -> Inventory:
    """Return this node's versions of the packages and digests of `paths`."""
    versions = {name: _version(name) for name in PACKAGES}
    versions |= {"python": platform.python_version(), "asyncrl's source": digest_sources()}
    return Inventory(versions, {path: digest_path(Path(path)) for path in paths})


def _version(name: str) -> str:
    for distribution in ALTERNATIVES.get(name, (name,)):
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


def digest_sources() -> str:
    """Return a digest of asyncrl's own Python files: two nodes may have the same number and other code."""
    root = Path(__file__).resolve().parents[3]
    digest = xxhash.xxh3_64()
    for package in SOURCES:
        for path in sorted((root / package).rglob("*.py")):
            digest.update(str(path.relative_to(root)).encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def digest_path(path: Path) -> str:
    """Return a digest of the file or folder at `path`, empty if it cannot be read."""
    digest = xxhash.xxh3_64()
    try:
        for file in islice(_files(path), MAX_FILES):
            digest.update(str(file.relative_to(path)).encode())
            for piece in _pieces(file, is_whole=path.is_file()):
                digest.update(piece)
        return digest.hexdigest() if path.exists() else ""
    except OSError:
        return ""


def _files(path: Path) -> Iterator[Path]:
    """Yield `path` itself or the files under it, in an order that is the same on every node."""
    if not path.is_dir():
        yield path
    for folder, below, names in os.walk(path):
        below.sort()
        yield from (file for name in sorted(names) if (file := Path(folder, name)).is_file())


def _pieces(file: Path, is_whole: bool) -> Iterator[bytes]:
    size = file.stat().st_size
    yield str(size).encode()
    if not is_whole and size > SMALL_BYTES:
        return
    with file.open("rb") as stream:
        yield stream.read(END_BYTES)
        stream.seek(max(0, size - END_BYTES))
        yield stream.read(END_BYTES)


@dataclass(frozen=True)
class Inventory:
    """Packages and files of a node.

    Attributes:
        versions: Of each package; empty where it is missing.
        files: Digest of each path's content; empty where nothing is.
    """

    versions: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)


def find_differences(
    home: Inventory, nodes: Mapping[str, Inventory | str], keys: Mapping[str, str]
) -> Iterator[str]:
    """Yield a sentence for each thing in which a node differs from home.

    Args:
        home: Of the node where `asyncrl up` was called.
        nodes: Of the others, by address; a text says why there is none.
        keys: Path of each key that names one.
    """
    for address, found in sorted(nodes.items()):
        if isinstance(found, str):
            yield f"node {address}: {found}"
            continue
        yield from (f"node {address}: {what}" for what in _compare(home, found, keys))


def _compare(home: Inventory, node: Inventory, keys: Mapping[str, str]) -> Iterator[str]:
    for package, version in sorted(home.versions.items()):
        other = node.versions.get(package, "")
        if other != version:
            yield f"{package} is {other or 'missing'}, here it is {version or 'missing'}"
    for key, path in keys.items():
        ours, other = home.files.get(path, ""), node.files.get(path, "")
        if ours and not other:
            yield f"{key}: there is no readable '{path}'"
        elif ours != other:
            yield f"{key}: '{path}' is not the same as here"
