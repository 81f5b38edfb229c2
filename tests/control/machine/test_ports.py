"""A held port is nobody else's, and the store of the ranks listens there all the same."""

import errno
import socket
from datetime import timedelta

import pytest
import zmq
from torch.distributed import TCPStore

from asyncrl.control.machine import ports
from asyncrl.control.machine.ports import HeldPort, held_row
from asyncrl.core.errors import AsyncrlError


def test_nobody_gets_a_held_port_by_chance_and_everybody_gets_it_once_it_is_let_go():
    with HeldPort() as port, socket.socket() as other:
        with pytest.raises(OSError) as refused:
            other.bind(("127.0.0.1", port.number))
        assert refused.value.errno == errno.EADDRINUSE
    with socket.socket() as other:
        other.bind(("127.0.0.1", port.number))


def test_the_store_of_the_ranks_listens_at_a_held_port():
    with HeldPort() as port:
        store = TCPStore("127.0.0.1", port.number, 1, is_master=True, timeout=timedelta(seconds=5))
        store.set("word", "said")
        assert store.get("word") == b"said"


def test_a_held_port_and_one_that_somebody_listens_at_are_not_held_again():
    with HeldPort() as port, pytest.raises(OSError, match="in use"):
        HeldPort(number=port.number)
    with socket.create_server(("127.0.0.1", 0)) as listener, pytest.raises(OSError, match="in use"):
        HeldPort(number=listener.getsockname()[1])


def test_a_service_listens_at_a_held_port_after_another_that_died_there():
    with HeldPort() as port:
        for _ in range(2):
            with zmq.Context() as context, context.socket(zmq.ROUTER) as end:
                end.bind(f"tcp://{port.address}")


def test_two_runs_hold_rows_without_a_common_port(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ports, "PORTS", range(31_000, 31_015))  # wherever two rows lie, there is no third
    monkeypatch.setattr(ports, "TRIES", 1000)
    with held_row("127.0.0.1", 5) as first:
        with held_row("127.0.0.1", 5) as second:
            assert not set(range(first, first + 5)) & set(range(second, second + 5))
            with pytest.raises(AsyncrlError, match="no 5 free ports"), held_row("127.0.0.1", 5):
                pass
        for number in range(first, first + 5):
            with pytest.raises(OSError, match="in use"):
                HeldPort(number=number)
