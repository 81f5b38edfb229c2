"""The keys of a run's sockets: CURVE key pairs and the allow-list of clients.

Made anew at each start of a run. There are two kinds of client, services and generators, and a server
knows by the key which one calls. Secrets are never printed: their fields stay out of `repr`. The files for
generators and learners of other makers have mode 0600 and no secret of the server.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from asyncrl.core.errors import ConfigError
from asyncrl.core.files.durable import replace_text

KEY_CHARACTERS = 40
"""Z85 text of 32 bytes."""


class Role(StrEnum):
    """Rights of a client: all operations, or only those that a server offers to generators."""

    SERVICE = "service"
    GENERATOR = "generator"


@dataclass(frozen=True)
class ServerKeys:
    """Keys of a server: its key pair, and the public keys that may connect, with the role of each."""

    public: bytes
    secret: bytes = field(repr=False)
    allowed: Mapping[bytes, Role]


@dataclass(frozen=True)
class ClientKeys:
    """Keys of a client: its key pair, and the server's public key."""

    public: bytes
    secret: bytes = field(repr=False)
    server: bytes


@dataclass(frozen=True)
class RunKeys:
    """The keys of one start of a run, or the part that one process gets: `client` is its own."""

    client: ClientKeys
    server: ServerKeys | None = None
    generator: ClientKeys | None = None

    def of_caller(self) -> RunKeys:
        """Return what a service gets that only calls others."""
        return RunKeys(self.client)

    def of_server(self) -> RunKeys:
        """Return what a service gets that others call."""
        return RunKeys(self.client, self.server)

    def of_generator(self) -> RunKeys:
        """Return what a replica gets, or a generator of another maker."""
        assert self.generator is not None, "these are the keys of one process"
        return RunKeys(self.generator)


def make_run_keys() -> RunKeys:
    """Return fresh keys: one pair for the run's servers, one for its services, one for its generators."""
    import zmq  # here: the command line reads this module and must stay quick

    public, secret = zmq.curve_keypair()
    service, generator = (ClientKeys(*zmq.curve_keypair(), server=public) for _ in range(2))
    allowed = {service.public: Role.SERVICE, generator.public: Role.GENERATOR}
    return RunKeys(service, ServerKeys(public, secret, allowed), generator)


def write_client_keys(path: Path, keys: ClientKeys) -> None:
    """Write `keys` to a file that only this user can read, whole or not at all."""
    names = ("public", "secret", "server")
    table = {name: getattr(keys, name).decode() for name in names}
    replace_text(path, json.dumps(table), 0o600)


def read_client_keys(path: Path) -> ClientKeys:
    """Return the keys in `path`, as `write_client_keys` wrote them.

    Raises:
        ConfigError: There is no such file, or it holds no keys.
    """
    try:
        table = json.loads(path.read_text())
        values = [table[name].encode() for name in ("public", "secret", "server")]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path} holds no keys: {type(error).__name__}",
            hint="A live run with launcher.curve on keeps those of generators in runs/<name>/keys.json",
        ) from error
    if any(len(value) != KEY_CHARACTERS for value in values):
        raise ConfigError(f"{path} holds no keys: a key has {KEY_CHARACTERS} characters")
    return ClientKeys(*values)
