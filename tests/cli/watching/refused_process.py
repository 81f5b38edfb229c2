"""Calls the command line with one set of words after the other, and says what each call did.

`python refused_process.py FOLDER` reads calls from stdin as JSON, a list of lists of words, and prints as
JSON for each its exit code, its output and the processes that it started; and which frameworks were loaded.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from typing import Any

HEAVY = ("torch", "vllm", "ray", "transformers", "megatron")
STARTS = ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system", "os.exec")
started: list[str] = []


def main(folder: str) -> None:
    """Make the calls in `folder`."""
    calls = json.load(sys.stdin)
    os.chdir(folder)
    sys.addaudithook(lambda event, args: started.append(f"{event} {args[0]}") if event in STARTS else None)
    done = [call(words) for words in calls]
    heavy = sorted(name for name in HEAVY if name in sys.modules)
    print(json.dumps({"calls": done, "heavy": heavy}))


def call(words: list[str]) -> dict[str, Any]:
    """Return what one call did."""
    from asyncrl.cli.app import main as cli

    out, err = io.StringIO(), io.StringIO()
    before = len(started)
    sys.argv = ["asyncrl", *words]
    code: Any = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            cli()
        except SystemExit as ended:
            code = ended.code
    return {"code": code or 0, "out": out.getvalue(), "err": err.getvalue(), "started": started[before:]}


if __name__ == "__main__":
    main(sys.argv[1])
