"""Keys: who gets a connection, and what a service does for those who get none."""

import asyncio
import contextlib
import gc
import json
import stat
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from asyncrl.core.errors import ConfigError, DeadlineExceeded, NotAllowed
from asyncrl.core.rpc import AsyncClient, Client, Server
from asyncrl.core.runtime.threads import ThreadEvent, ThreadRuntime
from asyncrl.core.sockets.keys import ClientKeys, RunKeys, make_run_keys, read_client_keys, write_client_keys
from asyncrl.core.sockets.listener import ENDPOINT
from tests.core.rpc.flooded_process import Echo

SOON_S = 0.4
"""Long for a connection on loopback, which takes about 5 ms: for calls that nobody answers."""
LONG_S = 30.0


@contextlib.contextmanager
def serving(server: Server) -> Iterator[Server]:
    stop = ThreadEvent()
    thread = threading.Thread(target=server.serve, args=(Echo(), stop))
    thread.start()
    try:
        yield server
    finally:
        stop.set()
        thread.join(LONG_S)


@pytest.fixture(scope="module")
def keys() -> RunKeys:
    return make_run_keys()


@pytest.fixture(scope="module")
def server(keys: RunKeys) -> Iterator[Server]:
    with serving(Server(ThreadRuntime(), keys=keys.server)) as server:
        yield server


def call(address: str, keys: ClientKeys | None, deadline_s: float = LONG_S) -> dict[str, int]:
    client = Client(ThreadRuntime(), address, keys)
    try:
        return client.call("echo", deadline_s=deadline_s, n=1).args
    finally:
        client.close()


def test_a_client_with_the_keys_of_its_run_is_served(server: Server, keys: RunKeys) -> None:
    client = Client(ThreadRuntime(), server.address, keys.client)
    assert client.call("echo", [b"abc"], n=1).frames == [b"abc"]
    client.close()


def test_an_async_client_with_the_keys_of_its_run_is_served(server: Server, keys: RunKeys) -> None:
    async def scenario() -> int:
        client = AsyncClient(ThreadRuntime(), server.address, keys.client)
        reply = await client.call("echo", n=2)
        client.close()
        return int(reply.args["n"])

    assert asyncio.run(scenario()) == 2


def test_a_stranger_who_knows_the_servers_public_key_is_refused_and_counted(
    server: Server, keys: RunKeys
) -> None:
    stranger = replace(make_run_keys().client, server=keys.client.server)
    with pytest.raises(DeadlineExceeded, match=r"'echo' at tcp://.* was not sent: no connection"):
        call(server.address, stranger, SOON_S)
    end = time.monotonic() + LONG_S
    while not server.counters["refused_keys"]:
        assert time.monotonic() < end
        time.sleep(0.01)
    assert call(server.address, keys.client) == {"n": 1}


def test_a_generators_key_opens_what_the_server_offers_to_generators_and_nothing_else(keys: RunKeys) -> None:
    with serving(Server(ThreadRuntime(), keys=keys.server, generator_ops={"push"})) as server:
        generator = Client(ThreadRuntime(), server.address, keys.of_generator().client)
        assert generator.call("push", [b"abc"], n=1).frames == [b"abc"]
        with pytest.raises(NotAllowed, match="'fence' is not for the key of a generator"):
            generator.call("fence")
        assert generator.call("push", n=2).args == {"n": 2}, "one refusal does not end the connection"
        service = Client(ThreadRuntime(), server.address, keys.client)
        assert service.call("fence", n=3).args == {"n": 3}
        assert (server.counters["refused_ops"], server.counters["requests"]) == (1, 3)
        generator.close()
        service.close()


def test_without_keys_there_is_one_kind_of_caller() -> None:
    with serving(Server(ThreadRuntime())) as server:
        assert call(server.address, None) == {"n": 1}


def test_the_keys_of_another_start_of_the_run_open_nothing(server: Server) -> None:
    with pytest.raises(DeadlineExceeded, match="were the keys made for this start"):
        call(server.address, make_run_keys().client, SOON_S)


def test_a_client_without_keys_is_not_heard_by_a_server_that_has_them(server: Server) -> None:
    before = server.counters["requests"]
    with pytest.raises(DeadlineExceeded, match="no connection without keys"):
        call(server.address, None, SOON_S)
    assert server.counters["requests"] == before


def test_two_servers_of_one_process_have_each_their_own_list(server: Server, keys: RunKeys) -> None:
    others = make_run_keys()
    with serving(Server(ThreadRuntime(), keys=others.server)) as other:
        assert call(other.address, others.client) == {"n": 1}
        assert call(server.address, keys.client) == {"n": 1}
        with pytest.raises(DeadlineExceeded):
            call(other.address, replace(keys.client, server=others.client.server), SOON_S)


def test_nobody_gets_in_while_nobody_answers_for_the_list(keys: RunKeys) -> None:
    server = Server(ThreadRuntime(), keys=keys.server)
    assert server._listener._gate is not None
    server._listener._gate.socket.unbind(ENDPOINT)
    with serving(server), pytest.raises(DeadlineExceeded):
        call(server.address, keys.client, SOON_S)


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_server_with_keys_that_is_never_closed_does_not_hold_up_the_collector(keys: RunKeys) -> None:
    server = Server(ThreadRuntime(), keys=keys.server)
    del server
    gc.collect()


def test_what_crosses_the_wire_cannot_be_read(keys: RunKeys, tmp_path: Path) -> None:
    secret_text = b"a prompt that nobody else may read"
    for client_keys, server_keys, is_readable in ((None, None, True), (keys.client, keys.server, False)):
        with (
            serving(Server(ThreadRuntime(), keys=server_keys)) as server,
            tapped(server.address) as (address, heard),
        ):
            client = Client(ThreadRuntime(), address, client_keys)
            client.call("echo", [secret_text])
            client.close()
        assert (secret_text in b"".join(heard)) is is_readable


@contextlib.contextmanager
def tapped(address: str) -> Iterator[tuple[str, list[bytes]]]:
    """Yield an address that forwards to `address`, and all bytes that passed."""
    import socket

    heard: list[bytes] = []
    host, port = address.removeprefix("tcp://").split(":")
    listener = socket.create_server(("127.0.0.1", 0))
    ends: list[socket.socket] = [listener]

    def pump(source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                heard.append(data)
                sink.sendall(data)

    def accept() -> None:
        with contextlib.suppress(OSError):
            here, _ = listener.accept()
            there = socket.create_connection((host, int(port)))
            ends.extend((here, there))
            for pair in ((here, there), (there, here)):
                threading.Thread(target=pump, args=pair, daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield f"tcp://127.0.0.1:{listener.getsockname()[1]}", heard
    finally:
        for end in ends:
            end.close()


def test_a_file_of_keys_can_be_read_by_its_user_only_and_holds_no_secret_of_the_server(
    keys: RunKeys, tmp_path: Path
) -> None:
    path = tmp_path / "keys.json"
    path.write_text("old")
    path.chmod(0o644)
    write_client_keys(path, keys.client)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_client_keys(path) == keys.client
    assert keys.server is not None
    assert keys.server.secret.decode() not in path.read_text()


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", '{"public": 1}', json.dumps(dict.fromkeys(("public", "secret", "server"), "x"))]
)
def test_a_file_without_keys_is_refused_by_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "keys.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"keys\.json holds no keys"):
        read_client_keys(path)


def test_secrets_are_not_printed(keys: RunKeys) -> None:
    assert keys.server is not None
    text = repr(keys)
    assert keys.client.secret.decode() not in text
    assert keys.server.secret.decode() not in text


OPEN_ADDRESSES = ["tcp://*:*", "tcp://0.0.0.0:*", "tcp://203.0.113.77:5555", "tcp://eth0:*", "tcp://[::]:*"]


@pytest.mark.parametrize("address", OPEN_ADDRESSES)
def test_a_server_without_keys_does_not_listen_where_other_machines_could_reach_it(address: str) -> None:
    with pytest.raises(ConfigError, match="open to the network without keys"):
        Server(ThreadRuntime(), address)


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_a_client_without_keys_says_nothing_over_the_network(kind: type[Client | AsyncClient]) -> None:
    with pytest.raises(ConfigError, match=r"tcp://203\.0\.113\.77:5555 .* without keys"):
        kind(ThreadRuntime(), "tcp://203.0.113.77:5555")


def test_a_server_with_keys_listens_on_every_interface(keys: RunKeys) -> None:
    with serving(Server(ThreadRuntime(), "tcp://0.0.0.0:*", keys=keys.server)) as server:
        port = server.address.rpartition(":")[2]
        assert call(f"tcp://127.0.0.1:{port}", keys.client) == {"n": 1}


@pytest.mark.parametrize(
    "address", ["tcp://127.0.0.9:1", "tcp://localhost:1", "tcp://[::1]:1", "ipc:///tmp/x"]
)
def test_loopback_and_socket_files_need_no_keys(address: str) -> None:
    Client(ThreadRuntime(), address).close()
