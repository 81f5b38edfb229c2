"""The table of families: what is tried of each one, and which cells are refused, in which words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tests.rollout.engine.families import WIDTHS, Form

COLUMNS: Mapping[str, str] = {
    "vllm": "two versions in the real engine, 1e-4 from transformers; then the first again, bit by bit",
    "megatron": "log-probs, entropies, the gradient of every tensor on packed rows, 1e-4 from transformers",
    "fsdp2": "the same",
    "lora_vllm": "two versions of adapters, merged by the engine: 1e-4 from transformers",
    "lora_megatron": "adapters after an update mean the same merged, and in PEFT, to 1e-5",
    "lora_fsdp2": "the same",
    "export": "after an update, loaded by transformers: the learner's log-probs to 1e-5",
}
"""What a cell shows where it says yes."""


@dataclass(frozen=True)
class Row:
    """A family.

    Attributes:
        refused: By column, words of the error that says why.
        targets: Matrices that get adapters.
    """

    form: Form
    refused: Mapping[str, str] = field(default_factory=dict)
    targets: tuple[str, ...] = ("q_proj", "v_proj", "o_proj", "up_proj", "down_proj")


def _row(family: str, refused: Mapping[str, str] | None = None, *targets: str, is_tied: bool = False) -> Row:
    form = Form(family, is_tied, 131, WIDTHS[0])
    return Row(form, refused or {}, targets or Row.targets)


def _other(words: str) -> dict[str, str]:
    """Refusals of a family without a record: any model is trained by FSDP2."""
    return {"megatron": words, "lora_megatron": words}


ROWS: Mapping[str, Row] = {
    row.form.family: row
    for row in (
        _row("llama"),
        _row("mistral"),
        _row("qwen2"),
        _row("qwen3", is_tied=True),
        _row(
            "phi3",
            {"lora_megatron": "no adapters on the fused matrices"},
            "qkv_proj",
            "o_proj",
            "gate_up_proj",
            "down_proj",
        ),
        _row("gemma", is_tied=True),
        _row("gemma2", _other("it caps the logits of attention"), is_tied=True),
        _row("gemma3_text", _other("its layers are of several kinds"), is_tied=True),
        _row("olmo2", _other("model_type 'olmo2' is not supported")),
        _row("granite", _other("it scales its logits and residuals")),
        _row("qwen3_moe", {}, "q_proj", "v_proj", "o_proj"),
        _row("mixtral", {}, "q_proj", "v_proj", "o_proj"),
        _row("olmoe", {}, "q_proj", "v_proj", "o_proj"),
        _row("glm4_moe", _other("it rotates a part of each head"), "q_proj", "v_proj", "o_proj"),
        _row("deepseek_v2", _other("its attention is latent"), "q_proj", "kv_b_proj", "o_proj"),
        _row("deepseek_v3", _other("its attention is latent"), "q_b_proj", "o_proj"),
    )
}
