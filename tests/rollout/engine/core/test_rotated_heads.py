"""Rotary positions of heads on a CPU: vLLM's kernel there, and its own formula."""

from __future__ import annotations

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding import get_rope

from rollout_service.engine.vllm.plugin import register

NUM_TOKENS, PLAIN, ROTARY = 7, 32, 64


@pytest.mark.parametrize("is_interleaved", [True, False])
def test_queries_and_a_shared_key_that_come_by_heads_are_rotated_at_their_own_positions(
    is_interleaved: bool,
) -> None:
    for _ in range(2):  # vLLM may call it twice in a process
        register()
    with set_current_vllm_config(VllmConfig()):
        rotary = get_rope(ROTARY, 64, not is_interleaved, {"rope_type": "default", "rope_theta": 10_000.0})
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(NUM_TOKENS, 2, PLAIN + ROTARY, generator=generator)[..., PLAIN:]
    key = torch.randn(NUM_TOKENS, 512 + ROTARY, generator=generator)[:, 512:].unsqueeze(1)
    position_N = torch.arange(NUM_TOKENS)
    angle_NF = position_N[:, None] * 10_000.0 ** (-torch.arange(0, ROTARY, 2) / ROTARY)
    wanted = [_rotate(x, angle_NF[:, None], is_interleaved=is_interleaved) for x in (query, key)]
    found = rotary.forward_cpu(position_N, query.clone(memory_format=torch.preserve_format), key)
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def _rotate(x: torch.Tensor, angle: torch.Tensor, *, is_interleaved: bool) -> torch.Tensor:
    a, b = (x[..., 0::2], x[..., 1::2]) if is_interleaved else x.chunk(2, -1)
    turned = torch.polar(torch.ones_like(angle), angle) * torch.complex(a, b)
    parts = torch.view_as_real(turned)
    return parts.flatten(-2) if is_interleaved else torch.cat([parts[..., 0], parts[..., 1]], -1)
