"""A held port is nobody else's, and the store of the ranks listens there all the same."""

import errno
import socket
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from asyncrl.control.launch.ports import HeldPort


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
