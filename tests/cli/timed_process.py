"""Calls the command line with each line of stdin; the last line says what the calls took, as JSON."""

from __future__ import annotations

import contextlib
import json
import resource
import sys
from typing import Any

HEAVY = ("torch", "vllm", "ray", "transformers", "megatron")


def main() -> None:
    """Make the calls, and print a list of what they took."""
    print("\n" + json.dumps([call(json.loads(line)) for line in sys.stdin]))


def call(words: list[str]) -> dict[str, Any]:
    """Return how one call ended, the processor time that it took, and which frameworks are loaded by now."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_utime
    from asyncrl.cli.app import main as cli

    code: Any = 0
    sys.argv = ["asyncrl", *words]
    with contextlib.redirect_stdout(sys.stderr):
        try:
            cli()
        except SystemExit as ended:
            code = ended.code
    user_s = resource.getrusage(resource.RUSAGE_SELF).ru_utime - before
    heavy = [name for name in HEAVY if name in sys.modules]
    return {"code": code or 0, "user_s": user_s, "heavy": heavy}


if __name__ == "__main__":
    main()
