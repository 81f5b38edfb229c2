"""Secrets that stand in a configuration, where every reader of the file and of `resolved.yaml` finds them.

Owns what counts as one: the password of a URL, and a value whose key says that it is secret. Must never
repeat one: what it says names the key alone. What the environment holds, `${NAME}`, is none.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, urlsplit

if TYPE_CHECKING:
    from asyncrl.core.config.root import Root

HIDDEN = "***"
_NAME = (
    r"(?:[\w.-]*(?:passw(?:or)?d|passphrase|secret|(?:secret|private|access|api)[_-]?key|authorization|credentials?)"
    r"|(?:[\w.-]*[_.-])?(?:access|api|auth|bearer|hf|id|oauth|private|refresh|security|session)[_-]?token"
    r"|(?:[\w.-]*[.])?token)"
)
"""Of a key of a section that takes any argument, or of a URL's query. `eos_token` is none."""
_SECRET_NAME = re.compile(_NAME, re.IGNORECASE)
_NAMED = re.compile(rf"(?<![\w.-]){_NAME}[\"']?\s*[:=]", re.IGNORECASE)
_QUERY = re.compile(rf"([?&]{_NAME}=)[^&\s]*", re.IGNORECASE)
_VARIABLES = re.compile(r"(\$\{\w+\})+")
_SHOWN = re.compile(r"(://[^:/@\s]*:)[^\s]*@")
"""To the last @: a password that was not quoted may hold one."""
_PASSWORD = re.compile(r"://[^/@\s]*:([^/\s]*)@")


Finding = tuple[tuple[str], str, str]
"""Of a conflict: its keys, what is wrong, what to do."""


def find_secrets(config: Root) -> Iterator[Finding]:
    """Yield what to say of each value that holds a secret."""
    yield from _search((), config.model_dump(mode="json"))


def _search(path: tuple[str, ...], value: object) -> Iterator[Finding]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _search((*path, str(key)), inner)
    elif isinstance(value, str):
        yield from _judge(path, value)
    elif isinstance(value, int) and not isinstance(value, bool) and _name_of(path) != "token":
        yield from _judge(path, str(value))  # but a number may be a token of a vocabulary
    elif isinstance(value, Sequence):
        for number, inner in enumerate(value):
            yield from _search((*path, str(number)), inner)


def _name_of(path: tuple[str, ...]) -> str:
    """Return the key that a value stands under, be it in a list."""
    return next((part for part in reversed(path) if not part.isdigit()), "")


def _judge(path: tuple[str, ...], text: str) -> Iterator[Finding]:
    key = ".".join(path)
    if has_password(text):
        hint = "Write ${NAME} for it, and export NAME before the start: redis://user:${NAME}@host"
        yield (key,), f"{key} holds a password", hint
    elif is_secret_name(name := _name_of(path)) and text and not _is_variable(text):
        hint = f"Name the environment variable that holds it, in an argument such as {name}_env"
        if path[:2] == ("metrics", "sinks"):
            hint = "Leave it out: the service's client reads it from its own variable, such as WANDB_API_KEY"
        yield (key,), f"{key} holds a secret", hint


def is_secret_name(name: str) -> bool:
    """Tell whether what stands under `name` is a secret.

    >>> [is_secret_name(name) for name in ("api_key", "X-Auth-Token", "api_key_env", "eos_token")]
    [True, True, False, False]
    """
    return _SECRET_NAME.fullmatch(name) is not None


def has_password(text: str) -> bool:
    """Tell whether `text` is a URL with a password that is no `${NAME}`.

    >>> has_password("redis://user:abc@host"), has_password("redis://user:${NAME}@host")
    (True, False)
    """
    found = _PASSWORD.search(text)
    if found is not None and not _is_variable(found[1]):
        return True
    if "://" not in text:
        return False
    try:
        query = parse_qsl(urlsplit(text).query)
    except ValueError:  # no URL
        return False
    return any(is_secret_name(name) and not _is_variable(value) for name, value in query)


def hide_passwords(text: str) -> str:
    """Return `text` with `***` for each password of a URL in it, also in its query.

    >>> hide_passwords("--set buffer.url=redis://user:abc@host")
    '--set buffer.url=redis://user:***@host'
    """
    return _QUERY.sub(rf"\1{HIDDEN}", _SHOWN.sub(rf"\1{HIDDEN}@", text))


def hide_secrets(name: str, value: object) -> object:
    """Return what stands under `name` with `***` for each secret in it.

    >>> hide_secrets("sinks", [{"wandb": {"api_key": "abc", "project": "x"}}])
    [{'wandb': {'api_key': '***', 'project': 'x'}}]
    """
    if isinstance(value, Mapping):
        return {key: hide_secrets(str(key), inner) for key, inner in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [hide_secrets(name, inner) for inner in value]
    if value is not None and is_secret_name(name):
        return HIDDEN
    return hide_passwords(value) if isinstance(value, str) else value


def hide_in_option(text: str) -> str:
    """Return the text of a `--set` as it may be shown: of one that names a secret the key alone.

    >>> hide_in_option("metrics.sinks=[{wandb: {api_key: abc}}]"), hide_in_option("learner.lr=1")
    ('metrics.sinks=***', 'learner.lr=1')
    """
    key, equals, _ = text.partition("=")
    if _NAMED.search(text) is None:
        return hide_passwords(text)
    return f"{key}={HIDDEN}" if equals else HIDDEN


def _is_variable(text: str) -> bool:
    return _VARIABLES.fullmatch(text) is not None
