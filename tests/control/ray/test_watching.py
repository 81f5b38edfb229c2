"""Waiting for a cluster's nodes, and noticing that it is gone."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

import pytest
import ray

from asyncrl.cli.run import wait_for_nodes
from asyncrl.control.ray import membership
from asyncrl.control.ray.bootstrap import LOST_AFTER, is_open, watching
from asyncrl.control.ray.placement import Node
from asyncrl.core.errors import ConfigError, DeadlineExceeded


def test_a_cluster_is_gone_after_many_silent_pulses_in_a_row_and_not_before() -> None:
    died = threading.Event()
    answers = [*[True] * 50, *([False] * (LOST_AFTER - 1) + [True]) * 5, *[False] * LOST_AFTER]
    asked: list[bool] = []

    def listens() -> bool:
        asked.append(answers[len(asked)])
        return asked[-1]

    with watching(listens, died.set, pulse_s=0.001):
        assert died.wait(30.0)
    assert asked == answers


def test_who_has_ended_is_not_told() -> None:
    died = threading.Event()
    with watching(lambda: False, died.set, pulse_s=0.02):
        pass
    assert not died.wait(0.02 * LOST_AFTER + 0.2)


def test_a_control_store_that_listens_is_told_from_one_that_is_gone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        assert is_open(address)
    assert not is_open(address)


def test_a_cluster_is_not_waited_for_where_nothing_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    joined: list[object] = []
    monkeypatch.setattr(ray, "init", lambda **asked: joined.append(asked["address"]))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        membership.join(address, "test")
        assert joined == [address]
    with pytest.raises(
        ConfigError, match=rf"cannot join the Ray cluster at {address}: nothing listens there"
    ):
        membership.join(address, "test")
    with pytest.raises(ConfigError, match=r"cannot join the Ray cluster at nowhere\.invalid:6379"):
        membership.join("nowhere.invalid:6379", "test")
    assert joined == [address]


def test_nodes_are_waited_for_and_those_that_came_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [Node("a", "10.0.0.1")]
    arrivals = iter([nodes, [*nodes, Node("b", "10.0.0.2")]])
    end = time.monotonic() + 60.0
    monkeypatch.setattr(wait_for_nodes, "POLL_S", 0.01)
    assert len(wait_for_nodes.await_nodes(lambda: next(arrivals), 2, end)) == 2
    with pytest.raises(DeadlineExceeded, match=r"1 of 2 nodes came: 10\.0\.0\.1"):
        wait_for_nodes.await_nodes(lambda: nodes, 2, time.monotonic())


def test_a_head_that_does_not_come_is_named_by_its_address() -> None:
    with pytest.raises(DeadlineExceeded, match=r"nothing listens at 127\.0\.0\.1:1"):
        wait_for_nodes.await_port("127.0.0.1:1", time.monotonic())


@pytest.mark.parametrize("arguments", [[], ["10.0.0.1"], ["10.0.0.1:6379", "two"], ["10.0.0.1", "2"]])
def test_wrong_arguments_are_told_the_right_ones(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert wait_for_nodes.main(arguments) == 2
    assert "HOST:PORT NODES" in capsys.readouterr().err


def test_a_raylet_that_refuses_connections_is_gone_and_one_that_is_silent_is_not() -> None:
    """A full backlog answers nothing, as a host does that is cut off: of that one Ray decides."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener, contextlib.ExitStack() as callers:
        port = listener.getsockname()[1]
        assert not membership._refuses("127.0.0.1", port)
        for _ in range(3):
            caller = callers.enter_context(socket.socket())
            caller.setblocking(False)
            caller.connect_ex(("127.0.0.1", port))
        assert not membership._refuses("127.0.0.1", port)
    assert membership._refuses("127.0.0.1", port)


def test_nodes_are_tried_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them is silent until all are asked, and every third one refuses then."""
    facts = {"NodeManagerAddress": "10.0.0.1", "Resources": {"CPU": 4.0}}
    told = [facts | {"Alive": at != 8, "NodeID": f"n{at}", "NodeManagerPort": at} for at in range(9)]
    asked = threading.Barrier(8)

    def refuses(host: str, port: int) -> bool:
        asked.wait(30.0)
        return port % 3 == 0

    monkeypatch.setattr("ray.nodes", lambda: told)
    monkeypatch.setattr(membership, "_refuses", refuses)
    assert [node.id for node in membership.living_nodes()] == ["n1", "n2", "n4", "n5", "n7"]
