"""Certificates, and TLS before a Redis that does not speak it."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from asyncrl.buffer.journals.redis.link import RedisLink


@dataclass(frozen=True)
class Certificate:
    """Signed by itself: whoever trusts it names it as the CA."""

    file: Path
    key_file: Path


def make_certificate(folder: Path, name: str, host: str) -> Certificate:
    """Write a certificate of `host`, a name or an address, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    who = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    is_address = host[0].isdigit()
    named = x509.IPAddress(ip_address(host)) if is_address else x509.DNSName(host)
    builder = x509.CertificateBuilder(who, who, key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(datetime.now(UTC) - timedelta(hours=1))
    builder = builder.not_valid_after(datetime.now(UTC) + timedelta(days=1))
    builder = builder.add_extension(x509.SubjectAlternativeName([named]), critical=False)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    made = Certificate(folder / f"{name}.pem", folder / f"{name}.key")
    made.file.write_bytes(builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
    plain = serialization.NoEncryption()
    form = serialization.PrivateFormat.PKCS8
    made.key_file.write_bytes(key.private_bytes(serialization.Encoding.PEM, form, plain))
    return made


class TlsFront:
    """Takes TLS connections and passes what they say on to a Redis."""

    def __init__(self, url: str, own: Certificate, clients: Certificate | None = None) -> None:
        host, _, port = RedisLink(url).label.removeprefix("redis://").partition("/")[0].partition(":")
        self._target = (host, int(port))
        self._context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._context.load_cert_chain(own.file, own.key_file)
        if clients is not None:
            self._context.load_verify_locations(clients.file)
            self._context.verify_mode = ssl.CERT_REQUIRED
        self._open: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(lambda loop, said: None)  # refused handshakes
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        begun = asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._context)
        self._server = asyncio.run_coroutine_threadsafe(begun, self._loop).result(10.0)
        self.port = int(self._server.sockets[0].getsockname()[1])

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(*self._target)
        self._open |= {writer, far_writer}
        await asyncio.gather(self._pass_on(reader, far_writer), self._pass_on(far_reader, writer))
        self._open -= {writer, far_writer}

    async def _pass_on(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(1 << 16):
                target.write(data)
                await target.drain()
        target.close()

    async def _abort_all(self) -> None:
        for writer in self._open:
            with contextlib.suppress(
                AttributeError
            ):  # of a TLS transport that was closed twice, in Python 3.11.2
                writer.transport.abort()

    def cut(self) -> None:
        """Cut every connection; new ones are taken."""
        asyncio.run_coroutine_threadsafe(self._abort_all(), self._loop).result(10.0)

    def close(self) -> None:
        async def end() -> None:
            self._server.close()
            await self._abort_all()
            while len(asyncio.all_tasks()) > 1:
                await asyncio.sleep(0.01)

        asyncio.run_coroutine_threadsafe(end(), self._loop).result(10.0)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60.0)
        self._loop.close()


@contextlib.contextmanager
def tls_front(url: str, own: Certificate, clients: Certificate | None = None) -> Iterator[TlsFront]:
    """Run a front of a Redis."""
    front = TlsFront(url, own, clients)
    try:
        yield front
    finally:
        front.close()
