"""A process forked from the nursery: what it has imported, and in which environment it runs."""

from __future__ import annotations

import os
import sys

from rollout_service.engine import core_nursery


def answer(queue) -> None:
    queue.put(
        (os.environ.get("SET_LATE"), "vllm.v1.engine.core" in sys.modules, os.environ["OMP_NUM_THREADS"])
    )


def test_a_child_has_vllm_imported_and_its_starter_s_environment(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    core_nursery.open_nursery()
    monkeypatch.setenv("SET_LATE", "after the fork server had begun")
    context = core_nursery.NurseryContext()
    queue = context.Queue()
    child = context.Process(target=answer, args=(queue,))
    child.start()
    late, has_vllm, num_threads = queue.get(timeout=120)
    child.join(30)
    assert child.exitcode == 0
    assert late == "after the fork server had begun"
    assert has_vllm
    assert num_threads == "1"
