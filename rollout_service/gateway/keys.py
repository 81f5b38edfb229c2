"""Keys of the gateway: the bearer key of the run's agents, and a key for each session.

Owns the comparison of secrets, in constant time, and the making of session keys. A key is never printed
and stands in no configuration: the gateway's comes from the environment. Invariant: without a key
only this machine can reach the gateway.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address

from asyncrl.core.errors import ConfigError

VARIABLE = "ASYNCRL_GATEWAY_KEY"
MIN_KEY_CHARS = 16
SESSION_KEY_BYTES = 24
MARKER_BYTES = 8


@dataclass(frozen=True)
class GatewayKey:
    """The key that opens sessions; empty where anybody on this machine may."""

    secret: str = field(default="", repr=False)

    def admits(self, given: str) -> bool:
        """Tell whether `given` is the key, in a time that does not depend on how much of it is right."""
        return not self.secret or hmac.compare_digest(given.encode(), self.secret.encode())


def read_key(environment: Mapping[str, str], host: str) -> GatewayKey:
    """Return the key that the environment holds for a gateway on `host`.

    Raises:
        ConfigError: `host` can be reached from elsewhere and there is no key, or it can be guessed.
    """
    secret = environment.get(VARIABLE, "")
    if secret and len(secret) < MIN_KEY_CHARS:
        raise ConfigError(f"{VARIABLE} has fewer than {MIN_KEY_CHARS} characters", hint="Use a random one")
    if not secret and not ip_address(host).is_loopback:
        raise ConfigError(
            f"the gateway would listen on {host} without a key",
            hint=f"Set {VARIABLE} in the environment of `asyncrl up`, or leave launcher.host out",
        )
    return GatewayKey(secret)


def make_session_key() -> str:
    """Return a new session key, fit for a header and for a path."""
    return secrets.token_urlsafe(SESSION_KEY_BYTES)


def make_marker() -> str:
    """Return a short text that no conversation holds, nor can foresee."""
    return secrets.token_hex(MARKER_BYTES)


def lookup_of(session_key: str) -> bytes:
    """Return what a session is kept under: the time of a look-up then says nothing of the key."""
    return hashlib.blake2b(session_key.encode(), digest_size=16).digest()
