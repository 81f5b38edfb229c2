"""Plain values: the types of JSON, YAML and msgpack documents whose keys are not known (pure)."""

from __future__ import annotations

JsonValue = str | int | float | bool | None | list["JsonValue"] | dict[str, "JsonValue"]
JsonObject = dict[str, JsonValue]
