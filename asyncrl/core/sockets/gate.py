"""The allow-list: answers libzmq's question whether a key may connect (ZAP, ZeroMQ RFC 27), and as what.

libzmq notes the answer with every message of the connection, see `role_of`.

libzmq asks over a socket of the server's own context, so that each server has its own list. The
server's one thread answers, between requests; no thread is added. Invariant: while nobody answers,
nobody gets in.
"""

from __future__ import annotations

import hmac
from collections import Counter

import zmq
from zmq.utils import z85

from asyncrl.core.sockets.keys import Role, ServerKeys

ENDPOINT = "inproc://zeromq.zap.01"
MAX_ANSWERS = 64
"""Questions answered in a row; then requests have their turn."""


class Gate:
    """Answers for one server. Made before its socket is bound."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: ServerKeys) -> None:
        self._allowed = keys.allowed
        self.socket = context.socket(zmq.REP)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(ENDPOINT)

    def answer(self, counters: Counter[str]) -> None:
        """Answer the questions that are there; count keys that are refused."""
        for _ in range(MAX_ANSWERS):
            try:
                question = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            role = self._role(question)
            if role is None:
                counters["refused_keys"] += 1
            code, text = (b"400", b"this key is not on the list") if role is None else (b"200", b"")
            self.socket.send_multipart([b"1.0", question[1], code, text, (role or "").encode(), b""])

    def _role(self, question: list[bytes]) -> Role | None:
        mechanism, credentials = question[5], question[6:]
        if mechanism != b"CURVE" or len(credentials) != 1:
            return None
        key = z85.encode(credentials[0])
        found = [role for one, role in self._allowed.items() if hmac.compare_digest(key, one)]
        return found[0] if found else None


def role_of(message: zmq.Frame) -> Role:
    """Return the role of the sender of `message`, a part of a message to a server that has a gate."""
    return Role(str(message.get("User-Id")))
