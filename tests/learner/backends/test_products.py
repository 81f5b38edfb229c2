"""Products by oneDNN: both backends find what they find with torch's own, gradients too."""

import pytest
import torch

from learner.batching.batch import build_batch
from learner.numerics import products
from tests.learner.lora.adapters import make_adapter
from tests.learner.parts.samples import make_groups, save_model
from tests.learner.parts.training import open_backend, open_fsdp2

KINDS = ("qwen2", "qwen3", "qwen3_moe")
"""With a bias, without, and with experts."""
INTEL, OTHER = "vendor_id\t: GenuineIntel\n", "vendor_id\t: AuthenticAMD\n"
needs_operator = pytest.mark.skipif(
    not hasattr(torch.ops.mkldnn, "_linear_pointwise"), reason="this torch has no oneDNN"
)


@pytest.fixture
def calls(monkeypatch):
    """Shapes of the products by oneDNN, which takes every one of float32."""
    found, operator = [], products.onednn

    def note(left_NK, right_KM):
        found.append((*left_NK.shape, right_KM.shape[1]))
        return operator(left_NK, right_KM)

    monkeypatch.setattr(products, "onednn", note)
    monkeypatch.setattr(products, "SMALLEST", 0)
    monkeypatch.setattr(products, "prefers_onednn", lambda: True)
    return found


def held_gradients(backend):
    if hasattr(backend, "_chunks"):
        parameters = [one for chunk in backend._chunks for one in chunk.parameters()]
        return [one.main_grad.clone() for one in parameters if one.requires_grad]
    return [one.tensor.grad.to_local().clone() for one in backend._engine.parameters]


def loss_of(logprobs_N, entropy_N, batch):
    loss = -((logprobs_N * batch.behaviour_N + 0.1 * entropy_N) * batch.loss_mask_N).sum()
    return loss / batch.totals.num_tokens, {}


def run(opener, model, **options):
    """Return log-probs, and the gradients of two updates: buffers must be added to, and emptied."""
    backend, found = opener(model, minibatches=1, max_tokens_per_microbatch=64, **options), []
    backend.set_step_gate(lambda *_: found.extend(held_gradients(backend)) or False)
    batch = build_batch(make_groups(seed=9), 0, {1: 0})
    logprobs_N = backend.logprobs(batch)[0]
    for _ in range(2):
        backend.update(batch, loss_of)
    backend.close()
    return [logprobs_N, *found]


@needs_operator
@pytest.mark.parametrize("has_adapters", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("opener", [open_backend, open_fsdp2])
def test_values_and_gradients_are_those_of_plain_products(
    opener, kind, has_adapters, calls, monkeypatch, tmp_path
):
    model = save_model(tmp_path / "model", kind)
    options = {}
    if has_adapters:
        targets = {"targets": ("q_proj", "v_proj")} if kind == "qwen3_moe" else {}
        options["lora"] = make_adapter(model, tmp_path / "adapter", **targets)
    found = run(opener, model, **options)
    num_calls = len(calls)
    assert num_calls > 50
    monkeypatch.setattr(products, "prefers_onednn", lambda: False)
    wanted = run(opener, model, **options)
    assert len(calls) == num_calls, "the second run is not another one"
    assert len(found) == len(wanted) > 3
    for ours, plain in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-5, atol=2e-6)


@needs_operator
def test_products_with_views_are_those_of_torch(calls):
    generator = torch.Generator().manual_seed(0)
    left_NK, right_KM = (torch.randn(*shape, generator=generator) for shape in ((37, 48), (48, 29)))
    for left in (left_NK, left_NK.T.contiguous().T):
        for right in (right_KM, right_KM.T.contiguous().T):
            torch.testing.assert_close(products.multiply(left, right), left_NK @ right_KM)
    assert len(calls) == 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_formats_stay_with_torch(dtype, calls):
    products.multiply(torch.ones(2, 3, dtype=dtype), torch.ones(3, 2, dtype=dtype))
    assert not calls


def test_small_products_stay_with_torch(calls, monkeypatch):
    monkeypatch.setattr(products, "SMALLEST", 13)
    products.multiply(torch.ones(2, 3), torch.ones(3, 2))
    assert not calls


@pytest.mark.parametrize(
    ("vendor", "capability", "wanted"),
    [(OTHER, "AVX512", True), (INTEL, "AVX512", False), (OTHER, "AVX2", False)],
)
def test_it_is_for_wide_processors_other_than_intels(vendor, capability, wanted, monkeypatch, tmp_path):
    (tmp_path / "cpuinfo").write_text(vendor)
    monkeypatch.setattr(products, "PROCESSOR", tmp_path / "cpuinfo")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert products.prefers_onednn.__wrapped__() is wanted
