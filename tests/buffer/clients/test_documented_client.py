"""The example in docs/buffer-client.md, as it stands there."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from pathlib import Path

from asyncrl.buffer.client import LearnerClient
from tests.buffer.parts import make_store, serving

PAGE = Path(__file__).resolve().parents[3] / "docs" / "buffer-client.md"


def test_the_documented_generator_and_learner_train_together() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    example: dict[str, object] = {}
    exec(compile(code, str(PAGE), "exec"), example)
    generate, train = example["generate"], example["train"]
    assert callable(generate)
    assert callable(train)
    with serving(make_store()) as service:
        results: list[int] = []
        learner = threading.Thread(target=lambda: results.append(train(service.address, 3)), daemon=True)
        learner.start()
        observer = LearnerClient(service.address)
        wait_until_published(observer, 1)  # a generator has its version from the weight sync
        # max_lag is 1 in the tests' settings: version 1 may sample the first two steps, not the third.
        assert asyncio.run(generate(service.address, 4)) == 4
        assert asyncio.run(generate(service.address, 2, version=2)) == 2
        learner.join(60.0)
        assert results == [3 * 2 * 2 * 3]
        status = observer.status()
        observer.close()
    assert (status.trained, status.open, status.residue) == (6, 0, 0)
    assert status.checkpoints == (3,)


def wait_until_published(observer: LearnerClient, version: int) -> None:
    deadline_s = time.monotonic() + 60.0
    while observer.status().last_version < version:
        assert time.monotonic() < deadline_s, "the learner never published"
        time.sleep(0.01)
