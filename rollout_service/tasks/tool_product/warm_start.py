"""The warm start: teach a tiny model how calls and answers look, never that they belong together.

It calls the calculator now and then, and copies the result now and then; mostly it guesses digits. So it
is right about one time in six, and only through the tool: reinforcement learning has to find that
calling and copying is what pays. Deterministic by seed on one thread.

Shapes: B examples, T tokens of the padded sequence.
"""

from __future__ import annotations

import random

import torch
import torch.nn.functional as F
from transformers import Qwen3ForCausalLM

from rollout_service.tasks.digit_sort.vocabulary import BOS, EOS, PAD
from rollout_service.tasks.digit_sort.warm_start import build_model
from rollout_service.tasks.tool_product.examples import draw_factors
from rollout_service.tasks.tool_product.vocabulary import (
    VOCABULARY,
    Factors,
    answer_text,
    call_text,
    encode,
    prompt_text,
    reply_text,
)

BATCH_SIZE = 256
LEARNING_RATE = 1e-3
CALL_SHARE = 0.35
COPY_SHARE = 0.5
MAX_TOKENS = 26


def train_warm_start(seed: int, num_steps: int) -> tuple[Qwen3ForCausalLM, float]:
    """Return the model and its last loss."""
    model, source = build_model(seed, len(VOCABULARY)), random.Random(seed)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # also what makes the result the same on every machine with this CPU
    loss = float("nan")
    try:
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
        model.train()
        for _ in range(num_steps):
            loss = _train_step(model, optimizer, source)
        return model.eval(), loss
    finally:
        torch.set_num_threads(threads)


def _train_step(model: Qwen3ForCausalLM, optimizer: torch.optim.Optimizer, source: random.Random) -> float:
    tokens_BT, targets_BT = _batch(source)
    logits_BTV = model(tokens_BT[:, :-1], use_cache=False).logits
    loss = F.cross_entropy(logits_BTV.transpose(1, 2), targets_BT[:, 1:], ignore_index=PAD)
    optimizer.zero_grad()
    torch.autograd.backward(loss)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return float(loss.detach())


def _batch(source: random.Random) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (tokens, targets): targets are PAD on what the model only reads."""
    tokens_BT = torch.full((BATCH_SIZE, MAX_TOKENS), PAD)
    targets_BT = torch.full((BATCH_SIZE, MAX_TOKENS), PAD)
    for row in range(BATCH_SIZE):
        start = 0
        for ids, is_said in _episode(draw_factors(source), source):
            end = start + len(ids)
            tokens_BT[row, start:end] = torch.tensor(ids)
            if is_said:
                targets_BT[row, start:end] = torch.tensor(ids)
            start = end
    return tokens_BT, targets_BT


def _episode(factors: Factors, source: random.Random) -> list[tuple[list[int], bool]]:
    """Return the pieces of one episode: token ids, and whether the model says them."""
    prompt = [BOS, *encode(prompt_text(factors))]
    if source.random() >= CALL_SHARE:
        return [(prompt, False), (_guess(source), True)]
    answer = [*encode(answer_text(factors)), EOS] if source.random() < COPY_SHARE else _guess(source)
    called = [*encode(call_text(factors)), EOS]
    return [(prompt, False), (called, True), (encode(reply_text(factors)), False), (answer, True)]


def _guess(source: random.Random) -> list[int]:
    return [*encode(str(source.randint(100, 9801))), EOS]
