"""Models as they are after a step or two of training, and the probes that their learner would ship."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from transformers import PreTrainedModel

from learner.batching.probe import ProbeRows
from weight_sync.memory.manifest import Probe

LR = 1e-3


def train(model: PreTrainedModel, num_steps: int, seed: int = 0) -> list[PreTrainedModel]:
    """Return the model after each of `num_steps` AdamW updates with policy gradients of random answers."""
    generator, trained = torch.Generator().manual_seed(seed), copy.deepcopy(model)
    optimizer = torch.optim.AdamW(trained.parameters(), lr=LR, weight_decay=0.0)
    steps = []
    for _ in range(num_steps):
        tokens_BT = torch.randint(0, model.config.vocab_size, (32, 12), generator=generator)
        advantages_B = torch.randn(32, generator=generator)
        logprobs_BTV = trained(tokens_BT).logits[:, :-1].log_softmax(-1)
        chosen_BT = logprobs_BTV.gather(2, tokens_BT[:, 1:, None])[..., 0]
        optimizer.zero_grad()
        torch.autograd.backward(-(chosen_BT * advantages_B[:, None]).mean())
        optimizer.step()
        steps.append(copy.deepcopy(trained))
    return steps


@torch.no_grad()
def probe_rows_of(model: PreTrainedModel, folder: Path) -> Probe:
    """Return the probe that a learner with these weights ships after a batch of all tokens.

    Args:
        folder: Gets the model's `config.json`.
    """
    model.config.save_pretrained(folder)
    rows = ProbeRows(folder, 0)
    tokens_RL = rows.build(range(model.config.vocab_size)).tokens_N.view(-1, rows.row_tokens)
    logprobs_RLV = model(tokens_RL).logits[:, :-1].log_softmax(-1)
    found_RL = logprobs_RLV.gather(2, tokens_RL[:, 1:, None])[..., 0]
    tokens, logprobs = tokens_RL.flatten().tolist(), found_RL.flatten().tolist()
    return Probe(tuple(tokens), tuple(logprobs), rows.row_tokens)
