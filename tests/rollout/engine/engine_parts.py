"""A tiny model, staged files of its weights, and an event loop in a thread, for tests of the engine."""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import xxhash
from transformers import PreTrainedModel, Qwen3ForCausalLM

from asyncrl.core.staleness import PolicyVersion
from rollout_service.tasks.digit_sort.vocabulary import build_tokenizer
from rollout_service.tasks.digit_sort.warm_start import build_model
from tests.different import as_saved
from weight_sync.memory import segments
from weight_sync.memory.manifest import Bucket, Manifest, Probe, TensorSpec, plan
from weight_sync.memory.staging import Staged

NamedTensors = Iterable[tuple[str, torch.Tensor]]
Change = Callable[[NamedTensors], NamedTensors]
BUCKET_BYTES = 1 << 20
CALL_DEADLINE_S = 120.0


def make_model(seed: int) -> Qwen3ForCausalLM:
    """Return the digit model with weights so large that its distributions are far from even.

    Every tensor is another one for another seed, norms too.
    """
    model = build_model(seed).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            middle = 1.0 if parameter.ndim == 1 else 0.0
            parameter.copy_(middle + 0.15 * torch.randn(parameter.shape, generator=generator))
    return model


def save_model(model: PreTrainedModel, folder: Path) -> Path:
    model.save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return folder


def sent_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return views of the model's tensors, buffers that are saved too, by the names of a checkpoint."""
    saved = model.state_dict().keys()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in saved}
    named = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return as_saved(named | buffers, model.config.model_type)


@contextmanager
def stage(
    model: PreTrainedModel, version: PolicyVersion, probe: Probe | None = None, change: Change = list
) -> Iterator[Staged]:
    """Write the model's weights as a receiver stages them; `change` may spoil them before.

    As a learner sends them: a tensor that two modules share comes once.
    """
    tensors = dict(change(sent_tensors(model).items()))
    specs = [
        TensorSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        for name, tensor in tensors.items()
    ]
    layout = plan(specs, BUCKET_BYTES)
    data = bytearray(layout.total_bytes)
    for entry in layout.tensors:
        data[entry.offset : entry.offset + entry.num_bytes] = bytes_of(tensors[entry.name])
    parts = [bytes(data[start : start + BUCKET_BYTES]) for start in range(0, len(data), BUCKET_BYTES)]
    buckets = tuple(Bucket(len(part), xxhash.xxh3_128(part).hexdigest()) for part in parts)
    path = segments.create(f"asyncrl-test-{uuid.uuid4().hex[:8]}", len(data))
    try:
        Path(path).write_bytes(data)
        yield Staged(version, path, Manifest(version, layout, buckets, probe))
    finally:
        segments.unlink(path)


@torch.no_grad()
def logprobs_of(
    model: PreTrainedModel, prompt: Sequence[int], response: Sequence[int], temperature: float = 1.0
) -> torch.Tensor:
    """Return Hugging Face's log-prob of each response token, float32 [T]."""
    ids = torch.tensor([[*prompt, *response]])
    logits = model(ids).logits[0, len(prompt) - 1 : -1].float() / temperature
    return logits.log_softmax(-1).gather(1, torch.tensor(list(response))[:, None])[:, 0]


def bytes_of(tensor: torch.Tensor) -> bytes:
    """Return the tensor's bytes, of any dtype: numpy knows no bfloat16."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def probe_of(model: PreTrainedModel, temperature: float = 1.0) -> Probe:
    """Return what a learner that holds `model` would ship."""
    tokens = (11, 3, 1, 4, 13, 1, 3, 4, 12, 0, 7, 5)
    logprobs = logprobs_of(model, tokens[:1], tokens[1:], temperature)
    return Probe(tokens, tuple(logprobs.tolist()), len(tokens), temperature)


@torch.no_grad()
def greedy_of(model: PreTrainedModel, prompt: Sequence[int], num_tokens: int, eos: int) -> list[int]:
    """Return the most probable continuation, up to the end of sequence."""
    ids = list(prompt)
    while len(ids) < len(prompt) + num_tokens:
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] == eos:
            break
    return ids[len(prompt) :]


class LoopThread:
    """An event loop in a thread; tests hand it coroutines and wait with a deadline."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def call(self, work: Coroutine[Any, Any, Any], deadline_s: float = CALL_DEADLINE_S) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(deadline_s)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60.0)
        self._loop.close()
