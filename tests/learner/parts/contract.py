"""Contract of every backend, checked the same way: Hugging Face's numbers, and a resume bit by bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from learner.batching.batch import PackedBatch, build_batch
from learner.checkpoint.pieces import matrix_shape
from tests.different import as_saved, assert_all_differ
from tests.learner.parts.samples import make_groups
from tests.learner.parts.training import train

FIRST_MOMENT_DECAY = 0.9
Opener = Callable[..., Any]


def weights_of(backend) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in backend.named_tensors()}


def is_bit_equal(ours, theirs) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def gradients_of(backend) -> dict[str, torch.Tensor]:
    """Return the gradient of the only update so far by Hugging Face name, whole.

    AdamW's first moment is a fixed share of it, and the pieces of a checkpoint say where it belongs.
    """
    gradients: dict[str, torch.Tensor] = {}
    for state in backend.snapshot_state().pieces:
        piece = state.piece
        whole = gradients.setdefault(piece.name, torch.full(piece.shape, torch.nan))
        part = whole.view(matrix_shape(piece.shape))[slice(*piece.rows), slice(*piece.columns)]
        part.copy_(state.values["exp_avg"].view_as(part) / (1 - FIRST_MOMENT_DECAY))
    return gradients


def by_hugging_face(folder: Path, batch: PackedBatch, temperature: float):
    """Return log-probs, entropies and squared probabilities row by row, each row alone and unpadded."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    logprobs, entropies, squares = [], [], []
    for start, end in zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True):
        logits = model(batch.tokens_N[None, start:end]).logits[0].float() / temperature
        table = logits.log_softmax(-1)
        logprobs.append(table.gather(-1, batch.labels_N[start:end, None])[:, 0])
        entropies.append(-(table.exp() * table).sum(-1))
        squares.append(table.exp().square().sum(-1))
    return torch.cat(logprobs), torch.cat(entropies), torch.cat(squares), model


def assert_equals_hugging_face(folder: Path, opener: Opener) -> Any:
    """Compare log-probs, entropies, and every parameter's gradient, on packed rows of many lengths.

    Returns the backend, still open.
    """
    batch = build_batch(make_groups(max_tokens=90), 0, {1: 0})
    weight_N = torch.linspace(-1, 1, batch.num_tokens)
    wanted, wanted_entropy, wanted_squares, model = by_hugging_face(folder, batch, 0.7)
    ((wanted + 0.1 * wanted_entropy) * weight_N).sum().backward()
    backend = opener(folder, temperature=0.7, grad_clip=1e9, betas=(FIRST_MOMENT_DECAY, 0.999))
    found, entropy = backend.logprobs(batch)
    torch.testing.assert_close(found, wanted.detach(), rtol=0, atol=1e-4)
    torch.testing.assert_close(entropy, wanted_entropy.detach(), rtol=0, atol=1e-4)
    same, _, squares = backend.logprobs_and_squares(batch)
    assert torch.equal(same, found)
    torch.testing.assert_close(squares, wanted_squares.detach(), rtol=0, atol=1e-5)
    metrics = backend.update(batch, lambda lp, h, part: (((lp + 0.1 * h) * weight_N).sum(), {}))
    norm = torch.stack([parameter.grad.norm() for parameter in model.parameters()]).norm().item()
    assert metrics["actor/grad_norm"] == pytest.approx(norm, rel=1e-4)
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert_gradients_equal(gradients_of(backend), as_saved(gradients, model.config.model_type))
    return backend


def assert_gradients_equal(ours: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    """Each within 1e-4 of its largest entry."""
    assert ours.keys() == wanted.keys()
    for name, gradient in wanted.items():
        largest = gradient.abs().max().item()
        torch.testing.assert_close(ours[name], gradient, rtol=0, atol=1e-4 * max(largest, 1e-6))


def assert_export_gives_back_every_bit(folder: Path, out: Path, opener: Opener) -> None:
    """Also right after a forward pass, which gathers weights that are cut."""
    backend = opener(folder)
    backend.logprobs(build_batch(make_groups(), 0, {1: 0}))
    backend.save_hf(out)
    backend.close()
    source, export = load_file(folder / "model.safetensors"), load_file(out / "model.safetensors")
    assert is_bit_equal(source, export)
    AutoModelForCausalLM.from_pretrained(out)


def assert_resume_is_bit_exact(opener: Opener, model: Path, folder: Path, dtype: str) -> None:
    """A second backend with another seed goes on as the first did, whatever it computed before it loads."""
    backend = opener(model, dtype=dtype)
    train(backend, range(2))
    backend.set_lr(3e-3)
    torch.rand(5)  # the generator is no longer where its seed put it
    backend.save_state(folder)
    drawn = torch.rand(3)
    saved, straight, straight_on = weights_of(backend), train(backend, range(2, 4)), weights_of(backend)
    backend.close()
    start = load_file(model / "model.safetensors")
    assert_all_differ([start, saved, straight_on], in_every_tensor=dtype == "float32")
    resumed = opener(model, dtype=dtype, seed=9)
    resumed.logprobs(build_batch(make_groups(), 0, {1: 0}))  # gathers weights that then go out of date
    resumed.load_state(folder)
    assert torch.equal(torch.rand(3), drawn)
    assert resumed.num_updates == 4
    assert train(resumed, range(2, 4)) == straight
    assert is_bit_equal(weights_of(resumed), straight_on)
    assert straight[0]["actor/lr"] == 3e-3
    resumed.close()
