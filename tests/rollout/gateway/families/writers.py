"""Writers of tool calls, of the kinds that the families' formats are made of."""

# ruff: noqa: RUF001  the letters of the formats are these

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Calls = Sequence[tuple[str, Mapping[str, Any]]]
Writer = Callable[[Calls], str]


def dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def raw(value: Any) -> str:
    """Return a value as formats of XML's kind write it: text as it is."""
    return value if isinstance(value, str) else dump(value)


def each(
    write: Callable[[str, Mapping[str, Any]], str], begin: str = "", between: str = "", end: str = ""
) -> Writer:
    """Return a writer that writes call by call."""
    return lambda calls: begin + between.join(write(*call) for call in calls) + end


def objects(begin: str, end: str = "", between: str = "\n", arguments: str = "arguments") -> Writer:
    """Each call is a JSON object between marks."""
    return each(lambda name, given: begin + dump({"name": name, arguments: given}) + end, between=between)


def listed(begin: str, end: str = "", arguments: str = "arguments") -> Writer:
    """All calls are one JSON list between marks."""
    return lambda calls: begin + dump([{"name": name, arguments: given} for name, given in calls]) + end


def tags(
    call: str, parameter: str, end: str, begin: str = "", close: str = "", between: str = "\n"
) -> Writer:
    """Each parameter is an element; `call` and `parameter` are patterns with their names and values."""

    def write(name: str, given: Mapping[str, Any]) -> str:
        parameters = "".join(parameter.format(key, raw(value)) for key, value in given.items())
        return call.format(name) + parameters + end

    return each(write, begin, between, close)


def kind_of(value: Any) -> str:
    return {str: "string", int: "number", dict: "object", list: "array"}[type(value)]


def python(begin: str = "[", end: str = "]", between: str = ", ") -> Writer:
    """All calls are a list of Python calls."""
    return each(
        lambda name, given: f"{name}({', '.join(f'{k}={v!r}' for k, v in given.items())})",
        begin,
        between,
        end,
    )


def dsml(block: str, space: str = "") -> Writer:
    """Each parameter says whether it is a string; all tags have DeepSeek's mark."""
    mark = f"｜DSML｜{space}"

    def write(name: str, given: Mapping[str, Any]) -> str:
        parameters = "".join(
            f'<{mark}parameter name="{key}" string="{dump(isinstance(value, str))}">{raw(value)}'
            f"</{mark}parameter>\n"
            for key, value in given.items()
        )
        return f'<{mark}invoke name="{name}">\n{parameters}</{mark}invoke>\n'

    return each(write, f"<{mark}{block}>\n", "", f"</{mark}{block}>")


def gemma(quote: str, value: Any) -> str:
    if isinstance(value, str):
        return f"{quote}{value}{quote}"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{k}:{gemma(quote, v)}" for k, v in value.items()) + "}"
    return "[" + ",".join(gemma(quote, v) for v in value) + "]" if isinstance(value, list) else dump(value)


def elements(mark: str, value: Any) -> str:
    """Nested elements, each tag after a mark; those of a list are called `item`."""
    named = value.items() if isinstance(value, Mapping) else [("item", one) for one in value]
    return "".join(
        f"{mark}<{k}>{elements(mark, v) if isinstance(v, dict | list) else raw(v)}{mark}</{k}>"
        for k, v in named
    )


def xtml(name: str, *inside: str, **attributes: Any) -> str:
    told = "".join(f' {key}="{value}"' for key, value in attributes.items())
    return f"<|open|>{name}{told}<|sep|>{''.join(inside)}<|close|>{name}<|sep|>"


def kimi_k3(calls: Calls) -> str:
    told = ""
    for number, (name, given) in enumerate(calls, 1):
        inside = [xtml("argument", raw(value), key=key, type=kind_of(value)) for key, value in given.items()]
        told += xtml("call", *inside, tool=name, index=number)
    return xtml("tools", told)


def kimi_k2(calls: Calls) -> str:
    told = "".join(
        f"<|tool_call_begin|>functions.{name}:{n}<|tool_call_argument_begin|>{dump(given)}<|tool_call_end|>"
        for n, (name, given) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{told}<|tool_calls_section_end|>"
