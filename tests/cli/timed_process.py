"""Calls the command line once: `python timed_process.py WORDS`; the last line says what it took, as JSON."""

from __future__ import annotations

import json
import resource
import sys
from typing import Any

HEAVY = ("torch", "vllm", "ray", "transformers", "megatron")


def main() -> None:
    """Make the call."""
    from asyncrl.cli.app import main as cli

    code: Any = 0
    try:
        cli()
    except SystemExit as ended:
        code = ended.code
    user_s = resource.getrusage(resource.RUSAGE_SELF).ru_utime
    heavy = [name for name in HEAVY if name in sys.modules]
    print("\n" + json.dumps({"code": code or 0, "user_s": user_s, "heavy": heavy}))


if __name__ == "__main__":
    main()
