"""Functions of the service packages, fetched by name: `asyncrl` imports none of them."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any


def function(name: str) -> Callable[..., Any]:
    """Return the function `package.module:name`."""
    module, _, attribute = name.partition(":")
    found: Callable[..., Any] = getattr(import_module(module), attribute)
    return found
