"""The task's eighteen tokens, one per character, and its texts.

A turn is `?47*83` (a call of the calculator) or `3901` (an answer); between turns the model reads `!3901=`.
Invariant: `encode(text)` equals what the saved tokenizer makes of `text`, but for the <bos> in front.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollout_service.tasks.digit_sort.vocabulary import VOCABULARY as DIGIT_SORT_VOCABULARY
from rollout_service.tasks.digit_sort.vocabulary import build_tokenizer as build_character_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Factors = tuple[int, int]

VOCABULARY = {
    **{token: index for token, index in DIGIT_SORT_VOCABULARY.items() if token != "<spare>"},
    "*": 15,
    "?": 16,
    "!": 17,
}


def prompt_text(factors: Factors) -> str:
    """Return the prompt as it stands in the data: `47*83=`."""
    return f"{factors[0]}*{factors[1]}="


def call_text(factors: Factors) -> str:
    """Return the turn that asks the calculator."""
    return f"?{factors[0]}*{factors[1]}"


def reply_text(factors: Factors) -> str:
    """Return what the model reads after that turn: what `configs/tool_product.yaml` has for `reply`."""
    return f"!{answer_text(factors)}="


def answer_text(factors: Factors) -> str:
    """Return the right answer."""
    return str(factors[0] * factors[1])


def encode(text: str) -> list[int]:
    """Return the token ids of `text`."""
    return [VOCABULARY[character] for character in text]


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Return the tokenizer, ready to be saved beside the model."""
    return build_character_tokenizer(VOCABULARY)
