"""Setting of every way: one model, its prompts, and their sampling (no engine here).

Owns the folder of a benchmark: a Qwen3 of 26 M random float32 weights, a tokenizer that knows each of its
tokens, and prompts with numbers in them, so that a reward has something to look for.
"""

from __future__ import annotations

import itertools
import json
import random
import string
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from asyncrl.core.config.tree import Config
from benchmarks.learner.inputs import save_qwen3
from benchmarks.weight_sync.peers.engine import MODEL

NUM_PROMPTS = 256
PROMPT_TOKENS = 32
MAX_TOKENS, MAX_MODEL_TOKENS = 64, 512
RESPONSES = "lognormal:0.5:24"
"""Short, so that what a request costs beside its tokens weighs the more, and turns end at about the same."""
MAX_SEQUENCES = 32
IN_FLIGHT = 40
"""Requests of the bare engine: a batch, and a quarter that waits, as a replica of whole groups wants."""
GROUP_SIZE = 8
KV_CACHE_BYTES = 256 << 20
START_S = 240.0
NO_BOUND = 1 << 20
"""Nothing is trained here: the ledger shall never hold a replica back."""


@dataclass(frozen=True)
class Count:
    """Tokens and requests of a way, done and in flight, at a time of the clock that all processes share."""

    at_s: float
    num_tokens: int
    num_requests: int
    num_in_flight: int


@dataclass(frozen=True)
class Rate:
    """Tokens and requests per second between two counts, and requests in flight at the second."""

    tokens_per_s: float
    requests_per_s: float
    in_flight: float


def rate_between(before: Count, after: Count) -> Rate:
    """Return the rates from `before` to `after`."""
    seconds = after.at_s - before.at_s
    num_tokens = after.num_tokens - before.num_tokens
    num_requests = after.num_requests - before.num_requests
    return Rate(num_tokens / seconds, num_requests / seconds, after.num_in_flight)


def make_folder(folder: Path) -> Path:
    """Write the model, its tokenizer and the prompts, and return the folder."""
    save_qwen3(folder, dtype=torch.float32, **MODEL)
    build_tokenizer(MODEL["vocab_size"]).save_pretrained(folder)
    lines = [
        {"prompt": make_prompt(number, PROMPT_TOKENS), "ground_truth": str(number)}
        for number in range(NUM_PROMPTS)
    ]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def make_prompt(number: int, num_tokens: int) -> str:
    """Return a text of `num_tokens` ASCII letters, each a token; texts of other numbers differ early."""
    letters = random.Random(number).choices(string.ascii_letters + string.digits, k=num_tokens)
    return "".join(letters)


def build_tokenizer(vocab_size: int) -> Any:
    """Return the tokenizer of tiny_text with made-up words beyond its bytes: every id has a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ("".join(three) for three in itertools.product(string.ascii_lowercase, repeat=3))
    tokens = ["<pad>", "<|im_start|>", "<|im_end|>", *letters]
    tokens += itertools.islice(words, vocab_size - len(tokens))
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<|im_end|>")


PLAIN = "ours"
EXTRAS: Mapping[str, Mapping[str, Any]] = {
    "turns": {
        "stop": ["e"],
        "environment": {"name": f"{Path(__file__).parent / 'go_on.py'}:GoOn", "max_turns": 4},
    },
    "gateway": {"gateway": {"port": 0}},
}
"""Replicas that do more, by name, and the part of `rollout` in which they differ. About one token of seven
has the letter that ends a turn, so that four turns are about as long as one answer of the others."""


def make_config(folder: Path, name: str = PLAIN) -> Config:
    """Return the configuration of a run on that folder that never waits for its learner.

    Args:
        name: `PLAIN`, or one of `EXTRAS`.
    """
    forced = {"response_tokens": RESPONSES} if name == PLAIN else EXTRAS[name]
    values = {
        "run": {"name": name, "dir": str(folder / "runs" / name)},
        "model": {"path": str(folder), "dtype": "float32"},
        "data": {
            "train": str(folder / "prompts.jsonl"),
            "max_prompt_tokens": MAX_MODEL_TOKENS - MAX_TOKENS,
        },
        "reward": {"fn": "gsm8k"},
        "rollout": {
            "group_size": GROUP_SIZE,
            "max_tokens": MAX_TOKENS,
            "max_sequences": MAX_SEQUENCES,
            "kv_cache_bytes": KV_CACHE_BYTES,
            "prefix_caching": False,  # as the bare engine beside it; another row tells what it gives
            **forced,
        },
        "staleness": {"max_lag": NO_BOUND, "ready_batches": NO_BOUND},
        "learner": {"groups_per_step": 16},
        "algorithm": {"drop_constant_groups": False},
        "buffer": {"lease_s": 600.0, "memory_bytes": 8 << 30},
    }
    return Config.model_validate(values)
