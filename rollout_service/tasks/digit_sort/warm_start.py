"""The warm start: teach a tiny model to answer with the prompt's digits in *random* order.

It learns the format and the copying, never the ordering: its accuracy is that of a shuffle, and
reinforcement learning has to supply the whole skill. Deterministic by seed on one thread.

Shapes: B examples, T tokens of the padded sequence.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from rollout_service.tasks.digit_sort.examples import MAX_DIGITS, Digits, draw_digits
from rollout_service.tasks.digit_sort.vocabulary import BOS, EOS, PAD, VOCABULARY, encode_prompt

BATCH_SIZE = 256
LEARNING_RATE = 1e-3
MAX_ANSWER_TOKENS = MAX_DIGITS + 1


@dataclass(frozen=True)
class WarmStart:
    """Result of the warm start: the model and its accuracy at temperature 1."""

    model: PreTrainedModel
    accuracy: float


def build_model(seed: int, num_tokens: int = len(VOCABULARY)) -> Qwen3ForCausalLM:
    """Return the untrained model: 125 thousand parameters, float32, a vocabulary of `num_tokens`."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=num_tokens,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=PAD,
        dtype="float32",
    )
    return Qwen3ForCausalLM(config)


def train_warm_start(
    seed: int,
    num_steps: int,
    probe: Sequence[Digits],
    build: Callable[[int], PreTrainedModel] = build_model,
) -> WarmStart:
    """Train what `build` makes of the seed on random permutations; measure its accuracy on `probe`."""
    model, source = build(seed), random.Random(seed)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # also what makes the result the same on every machine with this CPU
    try:
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
        model.train()
        for _ in range(num_steps):
            _train_step(model, optimizer, [draw_digits(source) for _ in range(BATCH_SIZE)], source)
        model.eval()
        return WarmStart(model, sampled_accuracy(model, probe, seed))
    finally:
        torch.set_num_threads(threads)


def _train_step(
    model: PreTrainedModel, optimizer: torch.optim.Optimizer, batch: list[Digits], source: random.Random
) -> None:
    tokens_BT, targets_BT = _permutation_batch(batch, source)
    logits_BTV = model(tokens_BT[:, :-1], use_cache=False).logits
    loss = F.cross_entropy(logits_BTV.transpose(1, 2), targets_BT[:, 1:], ignore_index=PAD)
    optimizer.zero_grad()
    torch.autograd.backward(loss)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def _permutation_batch(batch: list[Digits], source: random.Random) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (tokens, targets): targets are PAD on the prompt, so that only the answer is learnt."""
    width = MAX_DIGITS + 2 + MAX_ANSWER_TOKENS
    tokens_BT = torch.full((len(batch), width), PAD)
    targets_BT = torch.full((len(batch), width), PAD)
    for row, digits in enumerate(batch):
        prompt, answer = encode_prompt(digits), [*source.sample(digits, len(digits)), EOS]
        end = len(prompt) + len(answer)
        tokens_BT[row, :end] = torch.tensor([*prompt, *answer])
        targets_BT[row, len(prompt) : end] = torch.tensor(answer)
    return tokens_BT, targets_BT


@torch.no_grad()
def sampled_accuracy(model: PreTrainedModel, lists: Sequence[Digits], seed: int) -> float:
    """Return the share of `lists` that one answer sampled at temperature 1 sorts."""
    generator = torch.Generator().manual_seed(seed)
    num_right = 0
    for length in sorted({len(digits) for digits in lists}):
        same = [digits for digits in lists if len(digits) == length]  # one length: no padding needed
        tokens_BT = torch.tensor([encode_prompt(digits) for digits in same])
        for _ in range(length + 1):
            probs_BV = model(tokens_BT, use_cache=False).logits[:, -1].softmax(-1)
            tokens_BT = torch.cat([tokens_BT, torch.multinomial(probs_BV, 1, generator=generator)], 1)
        wanted_BT = torch.tensor([[*sorted(digits), EOS] for digits in same])
        num_right += int((tokens_BT[:, length + 2 :] == wanted_BT).all(1).sum())
    return num_right / max(1, len(lists))
