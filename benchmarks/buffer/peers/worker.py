"""One process of a way: obeys its parent line by line (standard library and numpy only).

    python -m benchmarks.buffer.peers.worker MODULE CLASS

A line in is JSON: `do` and its arguments; a line out is JSON: the result, or `error`. What libraries
print goes to stderr. The end of the input ends the process.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from typing import Any

from asyncrl.core.runtime.allocation import keep_freed_memory
from benchmarks.buffer.peers.load import Turn, Way


def main() -> None:
    """Obey until the input ends."""
    keep_freed_memory()  # as asyncrl's services do; here for every way, so that it favours none
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    way: Way = getattr(importlib.import_module(sys.argv[1]), sys.argv[2])()
    for line in sys.stdin:
        order = json.loads(line)
        try:
            result = {"result": obey(way, order)}
        except Exception as error:  # process boundary: the parent puts it into its table
            traceback.print_exc()
            result = {"error": f"{type(error).__name__}: {error}"[:500]}
        answers.write(json.dumps(result) + "\n")
        answers.flush()
    way.close()


def obey(way: Way, order: dict[str, Any]) -> Any:
    """Do one thing and return its plain result."""
    if order["do"] == "connect":
        return way.connect(order["address"])
    if order["do"] == "close":
        return way.close()
    turn = Turn(**order["turn"])
    if order["do"] == "open":
        return way.open(turn)
    act = way.produce if order["do"] == "produce" else way.consume
    return act(order["address"], turn, order["index"]).as_values()


if __name__ == "__main__":
    main()
