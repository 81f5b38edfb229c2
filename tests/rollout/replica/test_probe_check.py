"""Schedule of an engine's comparisons of its weights with the learner's; others test their figures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from asyncrl.core.errors import SyncError
from rollout_service.engine import probe as engine_probe
from rollout_service.engine.probe_check import ProbeCheck, Row
from weight_sync.memory.agreement import FIRST_CHECKS
from weight_sync.memory.manifest import Probe

PROBE = Probe((5, 6), (-0.5,), 2, every=10)
GOOD, BAD = 1e-6, 1.0


class Engine:
    """Its loads, and the steps at which they were compared."""

    def __init__(self) -> None:
        self._check = ProbeCheck()
        self.measured: list[int] = []

    def load(self, step: int, difference: float = GOOD) -> None:
        def measure(rows: Sequence[Row], _temperature: float) -> torch.Tensor:
            assert list(rows) == [PROBE.tokens]
            self.measured.append(step)
            return torch.tensor([PROBE.logprobs]) + difference

        self._check.check(measure, "float32", PROBE, step)


def test_an_engine_compares_its_first_loads_and_then_one_in_every_so_many_steps() -> None:
    engine = Engine()
    for step in range(40):
        engine.load(step)
    assert engine.measured == [*range(FIRST_CHECKS), 10, 20, 30]


def test_the_load_after_one_that_disagreed_is_compared_whatever_its_step() -> None:
    engine = Engine()
    for step in range(FIRST_CHECKS):
        engine.load(step)
    with pytest.raises(SyncError, match="engine and learner hold different weights"):
        engine.load(10, BAD)
    engine.load(11)
    engine.load(12)
    assert engine.measured[-2:] == [10, 11]


class Model(torch.nn.Module):
    """A model with one layer of a kind of attention that is not run here."""

    def __init__(self, kind: type) -> None:
        super().__init__()
        self.attn = torch.nn.Module.__new__(kind)
        torch.nn.Module.__init__(self.attn)


def kinds_of_attention() -> list[type]:
    from vllm.model_executor.layers import attention, mamba
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.model_executor.layers.mamba import mamba_mixer2

    assert mamba
    modules = (attention, mamba_mixer2)
    found = {kind for module in modules for kind in vars(module).values() if isinstance(kind, type)}
    kinds = {
        kind for kind in found if issubclass(kind, torch.nn.Module) and issubclass(kind, AttentionLayerBase)
    }
    return sorted(kinds - set(engine_probe.COVERED), key=lambda kind: kind.__name__)


def test_a_kind_of_attention_that_the_probe_does_not_run_is_refused_by_name() -> None:
    """It would run its own forward without metadata, and be compared with the learner's all the same."""
    kinds = kinds_of_attention()
    assert {"MLAAttention", "CrossAttention", "EncoderOnlyAttention", "MambaMixer2"} <= {
        kind.__name__ for kind in kinds
    }
    for kind in kinds:
        model: Any = Model(kind)
        with pytest.raises(SyncError, match=f"of 'attn', of the kind {kind.__name__}") as found:
            with engine_probe.plain_attention(model, 4):
                pass
        assert found.value.hint == "Set weight_sync.probe_every: 0"
