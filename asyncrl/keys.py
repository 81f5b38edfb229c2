"""The keys of a run's sockets: CURVE key pairs and the allow-list of clients.

Made anew at each start of a run. Secrets are never printed: their fields stay out of `repr`, and
`keys.json`, for generators of other makers, has mode 0600 and no secret of the server.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from asyncrl.durable import replace_text
from asyncrl.errors import ConfigError

KEY_CHARACTERS = 40
"""Z85 text of 32 bytes."""


@dataclass(frozen=True)
class ServerKeys:
    """What a server needs: its key pair, and the public keys that may connect."""

    public: bytes
    secret: bytes = field(repr=False)
    allowed: tuple[bytes, ...]


@dataclass(frozen=True)
class ClientKeys:
    """What a client needs: its key pair, and the server's public key."""

    public: bytes
    secret: bytes = field(repr=False)
    server: bytes


@dataclass(frozen=True)
class RunKeys:
    """The keys of one start of a run; a service that serves nobody gets no `server`."""

    client: ClientKeys
    server: ServerKeys | None = None

    def without_server(self) -> RunKeys:
        """Return what a service gets that only calls others."""
        return RunKeys(self.client)


def make_run_keys() -> RunKeys:
    """Return fresh keys: one pair for the run's servers and one for its clients."""
    import zmq  # here: the command line reads this module and must stay quick

    server_public, server_secret = zmq.curve_keypair()
    client_public, client_secret = zmq.curve_keypair()
    return RunKeys(
        ClientKeys(client_public, client_secret, server_public),
        ServerKeys(server_public, server_secret, (client_public,)),
    )


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
            hint="A live run with launcher.curve on keeps them in runs/<name>/keys.json",
        ) from error
    if any(len(value) != KEY_CHARACTERS for value in values):
        raise ConfigError(f"{path} holds no keys: a key has {KEY_CHARACTERS} characters")
    return ClientKeys(*values)
