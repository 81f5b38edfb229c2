"""Names of the parsers that read tool calls and reasoning in answers: vLLM's, whatever the engine.

Invariant: vLLM is not imported, which takes some ten seconds: a plan reads its tables of names.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from asyncrl.core.config.tree import Config

TABLES = {"tool_call_parser": "tool_parsers", "reasoning_parser": "reasoning"}
"""Configuration key of a parser -> the package of vLLM that registers its names."""


@dataclass(frozen=True)
class Parsers:
    """Names of vLLM's parsers of answers, None for none: of tool calls and of reasoning."""

    tools: str | None = None
    reasoning: str | None = None


def find_problems(config: Config) -> Iterator[str]:
    """Yield which parser of the gateway vLLM does not have, and that there is no vLLM at all."""
    gateway = config.rollout.gateway
    if gateway is None:
        return
    vllm = find_spec("vllm")
    if vllm is None or not vllm.submodule_search_locations:
        what = "rollout.gateway: vLLM, whose forms and parsers it has with any engine, is not installed"
        yield f"{what}; install asyncrl[cpu] or asyncrl[gpu], or 'make setup' in a checkout, or leave it out"
        return
    for key, package in TABLES.items():
        name = getattr(gateway, key)
        known = _read_names(Path(vllm.submodule_search_locations[0]) / package / "__init__.py")
        if name is not None and known and name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            near = f", perhaps {close[0]}" if close else ""
            yield f"rollout.gateway.{key}: vLLM has no {name!r}{near}; it has {', '.join(known)}"


def _read_names(table: Path) -> list[str]:
    """Return the keys of the dictionaries in `table`, sorted; none if there is no such file."""
    if not table.is_file():
        return []  # another vLLM: the gateway's start finds out
    keys = [
        key
        for node in ast.walk(ast.parse(table.read_text()))
        if isinstance(node, ast.Dict)
        for key in node.keys
    ]
    return sorted(key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str))
