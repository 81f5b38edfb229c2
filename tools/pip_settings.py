"""The machine's pip configuration as environment for uv, which does not read it (standard library only).

A machine that reaches its packages through a mirror, a wheel folder or its own certificate says so
to pip. Nothing of it is written down here: what is read goes to uv's environment and no further.
"""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

SECTIONS = ("global", "install", ":env:")
"""pip's sections that installing reads; the later wins."""

ONE = {
    "index-url": "UV_INDEX_URL",
    "cert": "SSL_CERT_FILE",
    "client-cert": "SSL_CLIENT_CERT",
    "proxy": "ALL_PROXY",
    "timeout": "UV_HTTP_TIMEOUT",
    "default-timeout": "UV_HTTP_TIMEOUT",
    "no-index": "UV_NO_INDEX",
}
MANY = {
    "extra-index-url": ("UV_EXTRA_INDEX_URL", " "),
    "find-links": ("UV_FIND_LINKS", ","),
    "trusted-host": ("UV_INSECURE_HOST", " "),
}
"""pip splits several values at white space; uv has a separator of its own for each."""


def read_pip_settings(python: Path) -> dict[str, str]:
    """Return pip's settings, by option, as the pip of `python` finds them."""
    command = [str(python), "-m", "pip", "config", "list"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return parse_pip_settings(done.stdout.splitlines())


def parse_pip_settings(lines: Iterable[str]) -> dict[str, str]:
    """Return the settings in `pip config list`'s lines (`global.find-links='a b'`).

    >>> parse_pip_settings(["global.index-url='a'", ":env:.index-url='b'"])
    {'index-url': 'b'}
    """
    found: dict[str, dict[str, str]] = {section: {} for section in SECTIONS}
    for line in lines:
        name, equals, value = line.partition("=")
        section, _, option = name.rpartition(".")
        if equals and section in found:
            found[section][option] = str(ast.literal_eval(value))
    return {option: value for section in SECTIONS for option, value in found[section].items()}


def uv_environment(settings: Mapping[str, str], environment: Mapping[str, str]) -> dict[str, str]:
    """Return `environment` with uv's variables for `settings`; a variable that is set already stays."""
    wanted = {variable: settings[option] for option, variable in ONE.items() if option in settings}
    for option, (variable, separator) in MANY.items():
        if option in settings:
            wanted[variable] = separator.join(settings[option].split())
    # As pip does: uv's default stops at the first index that has the name. Hashes decide on the file.
    wanted["UV_INDEX_STRATEGY"] = "unsafe-best-match"
    return {**wanted, **environment}
