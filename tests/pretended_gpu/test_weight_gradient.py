"""A matrix's gradient on a pretended GPU: added to float32 without a rounding on the way."""

from __future__ import annotations

import pytest
import torch

from learner.megatron.model.weight_gradient import add_weight_gradient
from tests.pretended_gpu.tensors import PretendedGpu, to_gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_product_of_a_gradient_is_added_in_float32(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: None)
    generator = torch.Generator().manual_seed(0)
    inputs_NI, gradient_NO = (torch.randn(40, size, generator=generator).to(dtype) for size in (8, 6))
    total_OI = torch.randn(6, 8, generator=generator)
    wanted_OI = total_OI + gradient_NO.T.float() @ inputs_NI.float()
    with PretendedGpu():
        on_gpu = to_gpu(total_OI.clone())
        add_weight_gradient(to_gpu(inputs_NI), to_gpu(gradient_NO), on_gpu)
        found_OI = on_gpu.cpu()
    torch.testing.assert_close(found_OI, wanted_OI, rtol=1e-6, atol=1e-5)
    rounded_OI = total_OI + (gradient_NO.T @ inputs_NI).float()
    assert (dtype is torch.float32) == torch.allclose(found_OI, rounded_OI, rtol=1e-6, atol=1e-5)
