"""Modules of vLLM's engine core, which the forkserver imports before it forks."""

from __future__ import annotations

from rollout_service.engine.vllm.core.process import without_collections

with without_collections():
    import vllm.v1.engine.core
    import vllm.v1.worker.cpu_worker  # noqa: F401
