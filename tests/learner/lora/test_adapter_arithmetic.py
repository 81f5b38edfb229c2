"""Adapters on both backends: log-probs, gradients, updates and folders are those of PEFT."""

import json

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from asyncrl.core.config.tree import LoraSection
from asyncrl.core.errors import ConfigError
from learner.batching.batch import build_batch
from learner.lora.factors import BaseReference
from learner.lora.folder import ADAPTER_CONFIG, save_adapter
from tests.learner.lora.adapters import in_peft, load_peft, make_adapter
from tests.learner.parts.contract import by_hugging_face
from tests.learner.parts.samples import make_groups, save_model
from tests.learner.parts.training import open_backend, open_fsdp2

NUM_STEPS, LR, CLIP, DECAY = 3, 1e-2, 0.05, 0.01
OPENERS = pytest.mark.parametrize("opener", [open_backend, open_fsdp2])
FIRST_SUM = 0.881032
"""Of the first A, as seed 0 and its name give it."""
ATTENTION = ("q_proj", "v_proj")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"), "qwen2_tied")


@pytest.fixture(scope="module")
def lora(model, tmp_path_factory):
    return make_adapter(model, tmp_path_factory.mktemp("adapter"))


def open_with(opener, model, lora, **changes):
    options = {"minibatches": 1, "warmup_steps": 0, "lr": LR, "grad_clip": CLIP, "weight_decay": DECAY}
    return opener(model, lora=lora, **(options | changes))


def batch_of(seed=9):
    return build_batch(make_groups(seed=seed), 0, {1: 0})


def loss_of(logprobs_N, _entropy_N, batch):
    """A policy gradient whose weights are the sampler's log-probs."""
    loss = -(logprobs_N * batch.behaviour_N * batch.loss_mask_N).sum() / batch.totals.num_tokens
    return loss, {}


def train_peft(peft, batch, make_optimizer, clip):
    """Return the norm of the gradient of each step, before it was clipped."""
    trained = [parameter for parameter in peft.parameters() if parameter.requires_grad]
    optimizer, norms = make_optimizer(trained), []
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        loss_of(in_peft(peft, batch), None, batch)[0].backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(trained, clip)))
        optimizer.step()
    return norms


class PlainGradientDescent:
    """A step gate that moves the backend's adapters itself and lets its optimizer do nothing."""

    def __init__(self, backend):
        self._backend, self.norms = backend, []
        backend.set_step_gate(self)

    def __call__(self, grad_norm, _metrics):
        self.norms.append(grad_norm)
        with torch.no_grad():
            for values, gradient in self._held():
                values.add_(gradient, alpha=-LR)
        return False

    def _held(self):
        if hasattr(self._backend, "_chunks"):
            parameters = [one for chunk in self._backend._chunks for one in chunk.parameters()]
            return [(one.data, one.main_grad) for one in parameters if one.requires_grad]
        return [(one.shard, one.tensor.grad.to_local()) for one in self._backend._engine.parameters]


@OPENERS
def test_updates_of_adapters_are_those_of_peft(opener, model, lora):
    batch, peft = batch_of(), load_peft(model, lora["path"])
    backend = open_with(opener, model, lora)
    before_N = backend.logprobs(batch)[0]
    torch.testing.assert_close(before_N, in_peft(peft, batch), rtol=0, atol=1e-5)
    descent = PlainGradientDescent(backend)
    for _ in range(NUM_STEPS):
        backend.update(batch, loss_of)
    norms = train_peft(peft, batch, lambda trained: torch.optim.SGD(trained, LR), clip=1e9)
    assert descent.norms == pytest.approx(norms, abs=1e-6, rel=1e-6)
    after_N = backend.logprobs(batch)[0]
    torch.testing.assert_close(after_N, in_peft(peft, batch), rtol=0, atol=1e-5)
    assert float((after_N - before_N).abs().max()) > 1e-3
    backend.close()


@OPENERS
def test_three_steps_of_adamw_end_where_peft_does(opener, model, lora):
    batch, peft = batch_of(), load_peft(model, lora["path"])
    backend = open_with(opener, model, lora)
    before_N = backend.logprobs(batch)[0]
    found = [backend.update(batch, loss_of)["actor/grad_norm"] for _ in range(NUM_STEPS)]
    options = {"lr": LR, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": DECAY}
    norms = train_peft(peft, batch, lambda trained: torch.optim.AdamW(trained, **options), CLIP)
    assert min(norms) > CLIP, "nothing is clipped"
    assert found == pytest.approx(norms, rel=1e-4)
    after_N = backend.logprobs(batch)[0]
    torch.testing.assert_close(after_N, in_peft(peft, batch), rtol=0, atol=2e-4)
    assert float((after_N - before_N).abs().max()) > 0.1
    backend.close()


@OPENERS
@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_an_adapter_that_peft_saved_is_trained_on(opener, kind, tmp_path):
    model = save_model(tmp_path / "model", kind)
    torch.manual_seed(3)
    config = LoraConfig(r=3, lora_alpha=5, target_modules=list(ATTENTION), init_lora_weights=False)
    peft = get_peft_model(AutoModelForCausalLM.from_pretrained(model, attn_implementation="eager"), config)
    peft.save_pretrained(tmp_path / "adapter")
    lora = {"rank": 3, "alpha": 5, "targets": ATTENTION, "path": str(tmp_path / "adapter")}
    backend, batch = open_with(opener, model, lora), batch_of()
    plain_N = by_hugging_face(model, batch, 1.0)[0].detach()
    wanted_N = in_peft(peft.eval(), batch).detach()
    assert float((plain_N - wanted_N).abs().max()) > 0.1
    torch.testing.assert_close(backend.logprobs(batch)[0], wanted_N, rtol=0, atol=1e-5)
    reference_N = BaseReference(backend).logprobs(batch)[0]
    torch.testing.assert_close(reference_N, plain_N, rtol=0, atol=1e-5)
    torch.testing.assert_close(backend.logprobs(batch)[0], wanted_N, rtol=0, atol=1e-5)
    backend.close()


@OPENERS
def test_trained_adapters_mean_the_same_merged_and_in_peft(opener, model, lora, tmp_path):
    backend, batch = open_with(opener, model, lora), batch_of()
    backend.update(batch, loss_of)
    trained_N = backend.logprobs(batch)[0]
    backend.save_hf(tmp_path / "merged")
    merged_N = by_hugging_face(tmp_path / "merged", batch, 1.0)[0]
    torch.testing.assert_close(merged_N, trained_N, rtol=0, atol=1e-5)
    save_adapter(str(model), tmp_path / "adapter", backend.named_tensors(), LoraSection(**lora))
    peft_N = in_peft(load_peft(model, tmp_path / "adapter"), batch)
    torch.testing.assert_close(peft_N, trained_N, rtol=0, atol=1e-5)
    backend.close()


@OPENERS
def test_both_backends_and_every_layout_begin_with_the_same_factors(opener, model):
    backend = open_with(opener, model, {"rank": 2})
    for name, factor in backend.named_tensors():
        if name.endswith("lora_B.weight"):
            assert not factor.any()
            continue
        bound = factor.shape[1] ** -0.5
        assert 0.8 * bound < float(factor.abs().max()) <= bound
    # The same on either backend and any machine.
    first = dict(backend.named_tensors())["model.layers.0.self_attn.q_proj.lora_A.weight"]
    assert float(first.sum()) == pytest.approx(FIRST_SUM, abs=1e-5)
    backend.close()


@OPENERS
@pytest.mark.parametrize(
    ("changes", "table", "told"),
    [
        ({"rank": 5}, {}, "another adapter"),
        ({"targets": ATTENTION}, {}, "another adapter"),
        ({}, {"use_rslora": True}, "use_rslora, which is not trained here"),
        ({}, {"modules_to_save": ["lm_head"]}, "modules_to_save, which is not trained here"),
        ({"targets": ("q_proj", "wq")}, {"target_modules": ["q_proj", "wq"]}, "called wq"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused(opener, changes, table, told, model, tmp_path):
    lora = make_adapter(model, tmp_path)
    stored = json.loads((tmp_path / ADAPTER_CONFIG).read_text())
    (tmp_path / ADAPTER_CONFIG).write_text(json.dumps(stored | table))
    with pytest.raises(ConfigError, match=told):
        open_with(opener, model, lora | changes)
