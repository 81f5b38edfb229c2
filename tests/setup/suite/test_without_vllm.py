"""A Python without vLLM: SGLang runs in an environment of its own, and needs nothing of vLLM's."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.setup.suite.core_alone import needs_all


@needs_all
@pytest.mark.long
def test_without_vllm_everything_but_its_adapter_can_be_imported() -> None:
    """Only what runs in vLLM's own processes cannot, and the gateway's serving, which is vLLM's front end."""
    command = [sys.executable, "-m", "tests.setup.suite.without_vllm"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=True)
    failed = set(done.stdout.split())
    assert "rollout_service.engine.vllm.weight_transfer" in failed, "vLLM was hidden"
    others = {name for name in failed if not name.startswith("rollout_service.engine.vllm.")}
    serving = {f"rollout_service.gateway.serving.{name}" for name in ("apis", "reading", "recorded")}
    assert others == {"rollout_service.engine.probe"} | serving
