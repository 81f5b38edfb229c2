"""The learner opens its publisher_client while the publisher is replaced."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncrl.core.errors import WireError
from asyncrl.core.rpc import Request, Server
from asyncrl.core.runtime.threads import ThreadEvent, ThreadRuntime
from weight_sync.publisher_client import PublisherClient

WAIT_S = 60.0


class Publisher:
    """Answers unless it is about to die; the segments that it names are another run's."""

    def __init__(self, answers: bool) -> None:
        self._answers = answers
        self.tokens: list[int] = []
        self.has_heard = ThreadEvent()

    def handle(self, request: Request) -> None:
        self.tokens.append(request.args["token"])
        self.has_heard.set()
        if self._answers:
            request.reply(**({"path": "/dev/shm/foreign-1"} if request.op == "acquire" else {}))

    def wake_at(self) -> float:
        return math.inf

    def tick(self, now: float) -> None:
        pass


@contextlib.contextmanager
def serving(address: str, publisher: Publisher) -> Iterator[None]:
    server, stop = Server(ThreadRuntime(), address), ThreadEvent()
    thread = threading.Thread(target=server.serve, args=(publisher, stop), daemon=True)
    thread.start()
    yield
    stop.set()
    thread.join(WAIT_S)
    assert not thread.is_alive()


def test_a_learner_whose_publisher_dies_as_it_opens_opens_at_the_successor(tmp_path: Path) -> None:
    address, opened = f"ipc://{tmp_path}/publisher", []
    opening = threading.Thread(
        target=lambda: opened.append(PublisherClient(ThreadRuntime(), address, "x-", 1 << 20, token=3))
    )
    dying, successor = Publisher(answers=False), Publisher(answers=True)
    with serving(address, dying):
        opening.start()
        assert dying.has_heard.wait(WAIT_S)
    with serving(address, successor):
        opening.join(WAIT_S)
    (publisher_client,) = opened
    assert (dying.tokens, successor.tokens) == ([3], [3])
    publisher_client.close()


def test_a_segment_of_another_run_is_not_written_to(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/publisher"
    with serving(address, Publisher(answers=True)):
        with contextlib.closing(
            PublisherClient(ThreadRuntime(), address, "x-", 1 << 20, token=3)
        ) as publisher_client:
            with pytest.raises(WireError, match="foreign-1, which is not a segment of this run"):
                publisher_client.has_room()
