"""The allow-list: answers libzmq's question whether a key may connect (ZAP, ZeroMQ RFC 27).

libzmq asks over a socket of the server's own context, so that each server has its own list. The
server's one thread answers, between requests; no thread is added. Invariant: while nobody answers,
nobody gets in.
"""

from __future__ import annotations

import hmac
from collections import Counter

import zmq
from zmq.utils import z85

from asyncrl.keys import ServerKeys

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
            is_allowed = self._is_allowed(question)
            if not is_allowed:
                counters["refused_keys"] += 1
            code, text = (b"200", b"") if is_allowed else (b"400", b"this key is not on the list")
            self.socket.send_multipart([b"1.0", question[1], code, text, b"", b""])

    def _is_allowed(self, question: list[bytes]) -> bool:
        mechanism, credentials = question[5], question[6:]
        if mechanism != b"CURVE" or len(credentials) != 1:
            return False
        key = z85.encode(credentials[0])
        return any(hmac.compare_digest(key, allowed) for allowed in self._allowed)
