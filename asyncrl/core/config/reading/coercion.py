"""Short forms of lists in a configuration: one item stands for a list of one (pure).

What cannot be such a list is returned as it came, for the tree to complain of.
"""

from __future__ import annotations


def as_list(value: object) -> object:
    """Return a list's items; a single text is a list of one."""
    if isinstance(value, str):
        return (value,)
    return tuple(value) if isinstance(value, list) else value


def as_sources(value: object) -> object:
    """Return sources; each may be a path by itself."""
    items = as_list(value)
    if not isinstance(items, tuple):
        return value
    return tuple({"path": item} if isinstance(item, str) else item for item in items)


def as_rewards(value: object) -> object:
    """Return rewards; a name by itself is one, and so is a section."""
    if isinstance(value, str | dict):
        value = (value,)
    if not isinstance(value, list | tuple):
        return value
    return tuple({"fn": one} if isinstance(one, str) else one for one in value)
