"""Child of the fork server that prints its environment: `python -m tests.rollout.forkserver_process`."""

from __future__ import annotations

import gc
import json
import os
import sys
from typing import Any

from rollout_service.engine.vllm.core import process


def answer(queue: Any) -> None:
    late, has_vllm = os.environ.get("SET_LATE"), "vllm.v1.engine.core" in sys.modules
    is_frozen = gc.isenabled() and gc.get_freeze_count() > 100_000
    threads = os.environ["OMP_NUM_THREADS"]
    queue.put({"late": late, "has_vllm": has_vllm, "num_threads": threads, "is_frozen": is_frozen})


def main() -> None:
    process.start_forkserver()
    os.environ["SET_LATE"] = "after the fork server had begun"
    context = process.CoreContext()
    queue = context.Queue()
    child = context.Process(target=answer, args=(queue,))
    child.start()
    found = queue.get(timeout=120)
    child.join(30)
    print(json.dumps(found | {"exitcode": child.exitcode}))


if __name__ == "__main__":
    main()
