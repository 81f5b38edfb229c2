"""Comparison of the nodes' inventories with that of the home node: the list of missing things (pure)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Inventory:
    """Packages and files of a node.

    Attributes:
        versions: Of each package; empty where it is missing.
        files: Digest of what lies at each path; empty where nothing does.
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
