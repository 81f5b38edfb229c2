"""Kernels on a pretended GPU: padded attention never by cuDNN, which plans each new shape; gradients."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from learner.attention.pieces import whole_rows
from learner.attention.rectangles import RectanglePieces
from learner.megatron.linear import add_weight_gradient
from tests.pretended_gpu.device.tensors import GPU, PretendedGpu, to_gpu


@pytest.mark.parametrize("is_on_gpu", [True, False])
def test_cudnn_is_asked_on_the_cpu_alone(monkeypatch: pytest.MonkeyPatch, is_on_gpu: bool) -> None:
    real, is_cudnn_allowed = functional.scaled_dot_product_attention, []

    def attend(*args: torch.Tensor, **options: object) -> torch.Tensor:
        is_cudnn_allowed.append(torch.backends.cuda.cudnn_sdp_enabled())
        return real(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(functional, "scaled_dot_product_attention", attend)
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: None)
    values = torch.randn(43, 2, 8, generator=torch.Generator().manual_seed(0))
    layout = RectanglePieces.of(whole_rows([0, 40, 43]))
    alone = layout.attend(values, values, values, None)
    if is_on_gpu:
        is_cudnn_allowed.clear()
        with PretendedGpu():
            on_gpu = to_gpu(values)
            found = layout.to(GPU).attend(on_gpu, on_gpu, on_gpu, None)
            torch.testing.assert_close(found.cpu(), alone)
    assert is_cudnn_allowed == [not is_on_gpu] * 2


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
