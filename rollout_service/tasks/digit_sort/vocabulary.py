"""The task's sixteen tokens and the tokenizer that maps text to them, one token per character.

Invariant: `encode_prompt(digits)` equals what the saved tokenizer makes of `prompt_text(digits)`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

DIGITS = "0123456789"
PAD, BOS, EOS, EQUALS, UNKNOWN = 10, 11, 12, 13, 14
SPARE = 15
VOCABULARY = {
    **{digit: index for index, digit in enumerate(DIGITS)},
    "<pad>": PAD,
    "<bos>": BOS,
    "<eos>": EOS,
    "=": EQUALS,
    "<unk>": UNKNOWN,
    "<spare>": SPARE,
}


def prompt_text(digits: Sequence[int]) -> str:
    """Return the prompt for `digits` as it stands in the data: `3142=`; the tokenizer puts <bos> in front."""
    return "".join(DIGITS[digit] for digit in digits) + "="


def encode_prompt(digits: Sequence[int]) -> list[int]:
    """Return the token ids of the prompt for `digits`."""
    return [BOS, *digits, EQUALS]


def answer_text(digits: Sequence[int]) -> str:
    """Return the right answer: the digits in ascending order."""
    return "".join(DIGITS[digit] for digit in sorted(digits))


def build_tokenizer(vocabulary: Mapping[str, int] = VOCABULARY) -> PreTrainedTokenizerFast:
    """Return the tokenizer, ready to be saved beside the model."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel(dict(vocabulary), unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", BOS)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        additional_special_tokens=[token for token in vocabulary if token == "<spare>"],
    )
