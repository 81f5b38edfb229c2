"""Access control of the control API.

Owns the run's two secrets of HTTP: the key, which may do all, and the page's token, which may only read.
The token is made from the key by a one-way function: it is stored nowhere, and a user who can read the run's
`run.json` (mode 0600) can name the page. Neither secret may get into a log, a redirect or a referrer.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Sequence
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs, urlsplit

from asyncrl.core.errors import AsyncrlError

READ_METHODS = ("GET",)
HOSTS = ("127.0.0.1", "localhost", "[::1]")
"""As browsers name this machine, also before a tunnel to it."""
TOKEN_CHARACTERS = 32


class NoAccess(AsyncrlError, PermissionError):
    """The request lacks a secret that permits it."""


def page_token(key: str) -> str:
    """Return the token of the run whose key is `key`.

    >>> page_token("a") == page_token("b")
    False
    """
    return hmac.new(key.encode(), b"asyncrl page", hashlib.sha256).hexdigest()[:TOKEN_CHARACTERS]


def page_url(url: str, key: str) -> str:
    """Return the page's address with its token, for the terminal of the run's owner and nobody else.

    Args:
        url: Of the control API, as `run.json` has it. key: The run's, from the same file.
    """
    return f"{url}/?token={page_token(key)}"


class Gate:
    """Knows the secrets of one run. Cookies are the same for all ports of a host: their name has the port."""

    def __init__(self, key: str, port: int) -> None:
        self._key = key
        self._token = page_token(key)
        self._cookie_name = f"asyncrl_page_{port}"

    def cookie_for(self, target: str) -> str:
        """Return what a browser that came with the token sends from then on; empty if it came without.

        No script can read it, and no other site's page can make a browser send it.
        """
        if not _is_same(token_in(target), self._token):
            return ""
        return f"{self._cookie_name}={self._token}; Path=/; HttpOnly; SameSite=Strict"

    def check(self, method: str, target: str, authorization: str, cookies: str) -> None:
        """Let a request pass.

        Args:
            target: Path and query. authorization, cookies: These headers, empty if they are not there.

        Raises:
            NoAccess: It may not.
        """
        bearer = authorization.removeprefix("Bearer ")
        if _is_same(bearer, self._key):
            return
        shown = (bearer, token_in(target), self._read_cookie(cookies))
        if not any(_is_same(one, self._token) for one in shown):
            raise NoAccess(
                "the bearer key is missing or wrong", hint="'asyncrl status' prints the page's address"
            )
        if method not in READ_METHODS:
            raise NoAccess("the page's token only reads; commands take the run's bearer key")

    def _read_cookie(self, header: str) -> str:
        try:
            found = SimpleCookie(header).get(self._cookie_name)
        except CookieError:
            return ""
        return "" if found is None else found.value


def check_host(named: Sequence[str]) -> None:
    """Refuse a request that a browser was led to send here by another site's name (DNS rebinding).

    Args:
        named: The values of its Host headers; with any port, since a tunnel has one of its own.

    Raises:
        ValueError: One of them is not this machine.

    >>> check_host(["localhost:8000"])
    """
    for host in named:
        if re.sub(r":\d*$", "", host).lower() not in HOSTS:
            raise ValueError(f"this server is called {', '.join(HOSTS)}, and not as the Host header says")


def token_in(target: str) -> str:
    """Return the token that a path's query holds, empty if none.

    >>> token_in("/?token=abc"), token_in("/"), token_in("http://[")
    ('abc', '', '')
    """
    try:
        return parse_qs(urlsplit(target).query).get("token", [""])[0]
    except ValueError:  # no URL
        return ""


def _is_same(given: str, secret: str) -> bool:
    return hmac.compare_digest(given.encode("utf-8", "replace"), secret.encode())
