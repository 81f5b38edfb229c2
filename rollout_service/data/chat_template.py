"""The chat template of a model folder, rendered as `transformers` renders it, and without it.

Invariant: a text is returned only if `transformers` makes the same one of the chat; None if that cannot be
told.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jinja2 import Template

FILE = "chat_template.jinja"
OTHER_FILES = ("chat_template.json", "additional_chat_templates")
TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Special tokens that a template may name."""


@dataclass(frozen=True)
class ChatTemplate:
    """A compiled template, and the special tokens that it may name."""

    template: Template
    tokens: Mapping[str, str]

    @staticmethod
    def open(model: Path) -> ChatTemplate | None:
        """Return the template in the folder `model`, None without one that is known to render alike."""
        text, table = _read_text(model), _read_config(model)
        tokens = {name: _content(table[name]) for name in TOKENS if table.get(name) is not None}
        # The class of a tokenizer has defaults for tokens that its file does not mention.
        is_known = all(name in table for name in TOKENS if re.search(rf"\b{name}\b", text))
        template = _compile(text) if text and is_known else None
        return None if template is None else ChatTemplate(template, tokens)

    def render(self, chat: Sequence[Mapping[str, str]]) -> str | None:
        """Return `chat` with the beginning of an answer, None if the template refuses it."""
        messages = [dict(message) for message in chat]
        try:
            return self.template.render(
                messages=messages, tools=None, documents=None, add_generation_prompt=True, **self.tokens
            )
        except Exception:  # a template is a program of its author's
            return None


def has_no_template(model: Path) -> bool:
    """Tell whether the tokenizer in the folder `model` is known to have no chat template."""
    if not (model / "tokenizer_config.json").is_file():
        return False
    return not _read_config(model).get("chat_template") and not any(
        (model / name).exists() for name in (FILE, *OTHER_FILES)
    )


def _read_config(model: Path) -> Mapping[str, object]:
    try:
        return dict(json.loads((model / "tokenizer_config.json").read_bytes()))
    except (OSError, ValueError, TypeError):
        return {}


def _read_text(model: Path) -> str:
    """Return the template for chats without tools, empty without one."""
    try:
        return (model / FILE).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        found = _read_config(model).get("chat_template")
    if isinstance(found, list):
        found = next((one.get("template") for one in found if one.get("name") == "default"), None)
    return found if isinstance(found, str) else ""


def _content(token: object) -> str:
    return str(token["content"] if isinstance(token, dict) else token)


def _compile(text: str) -> Template | None:
    """Return the template, None if it is none or has a tag that only `transformers` knows."""
    from jinja2 import TemplateError
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def to_json(
        value: object,
        ensure_ascii: bool = False,
        indent: int | str | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(
            value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(text)
    except TemplateError:
        return None
