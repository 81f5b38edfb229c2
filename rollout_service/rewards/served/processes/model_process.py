"""The process of a reward model: loads a sequence classifier, then scores batches.

What it reads is the tokenizer's chat template over the messages and the response, or prompt and response
one after the other where the prompt is plain text or there is no template.

Shapes: B answers, L labels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import msgspec

from asyncrl.core.errors import ConfigError
from rollout_service.rewards.score import Fault
from rollout_service.rewards.served.frames import ParentLink
from rollout_service.rewards.served.messages import Batch, BatchScores, ModelItem, ModelSettings


class Classifier:
    """The model and its tokenizer. Arguments as of `ModelSettings`. Raises ConfigError."""

    def __init__(self, path: str, label: int | None, device: str, dtype: str) -> None:
        import torch
        from transformers import AutoModelForSequenceClassification, AutoTokenizer
        from transformers.utils import logging

        logging.disable_progress_bar()
        if not Path(path).is_dir():
            raise ConfigError(f"the reward model {path} is not a folder")
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(path)
            model = AutoModelForSequenceClassification.from_pretrained(path, dtype=getattr(torch, dtype))
            self._model = model.to(device).eval()
        except (OSError, ValueError, RuntimeError, AttributeError) as error:
            raise ConfigError(f"the reward model {path} cannot be loaded: {error}") from error
        num_labels, config = self._model.config.num_labels, self._model.config
        if (num_labels == 1) != (label is None) or not (label is None or 0 <= label < num_labels):
            hint = "Leave `label` out" if num_labels == 1 else f"Set `label`, 0 to {num_labels - 1}"
            raise ConfigError(f"the reward model {path} has {num_labels} labels", hint=hint)
        if self._tokenizer.pad_token is None:
            self._tokenizer.pad_token = self._tokenizer.eos_token
        if getattr(config, "pad_token_id", None) is None:
            config.pad_token_id = self._tokenizer.pad_token_id
        self._label = label
        self._max_tokens = (
            getattr(config, "max_position_embeddings", None) or self._tokenizer.model_max_length
        )

    def score(self, items: Sequence[ModelItem]) -> list[float | tuple[Fault, str]]:
        """Return a number per item, or (kind, reason) where there is none."""
        said: dict[int, float | tuple[Fault, str]] = {}
        fitting: dict[int, list[int]] = {}
        for place, item in enumerate(items):
            try:
                fitting[place] = self._ids_of(item)
            except ConfigError as error:
                said[place] = ("refused", ascii(error.message)[1:-1])
        if fitting:
            numbers = self._compute(list(fitting.values()))
            for place, number in zip(fitting, numbers, strict=True):
                is_right = math.isfinite(number)
                said[place] = number if is_right else ("not_finite", f"the model returned {number}")
        return [said[place] for place in range(len(items))]

    def _ids_of(self, item: ModelItem) -> list[int]:
        """Return what the model reads. Raises ConfigError: it takes no such answer."""
        try:
            ids: list[int] = self._tokenizer(self._text_of(item), add_special_tokens=True)["input_ids"]
        except Exception as error:  # a template of the model's may raise anything
            raise ConfigError(f"it cannot be written as text: {type(error).__name__}: {error}") from error
        if not 0 < len(ids) <= self._max_tokens:
            raise ConfigError(f"{len(ids)} tokens, and the model takes 1 to {self._max_tokens}")
        return ids

    def _text_of(self, item: ModelItem) -> str:
        prompt, response = item["prompt"], item["response"]
        if isinstance(prompt, str):
            return str(prompt) + str(response)
        if self._tokenizer.chat_template:
            messages = [*prompt, {"role": "assistant", "content": response}]
            return str(self._tokenizer.apply_chat_template(messages, tokenize=False))
        return "\n".join([*(str(message["content"]) for message in prompt), response])

    def _compute(self, ids: Sequence[Sequence[int]]) -> list[float]:
        import torch

        batch = self._tokenizer.pad({"input_ids": list(ids)}, return_tensors="pt").to(self._model.device)
        with torch.inference_mode():
            logits_BL = self._model(**batch).logits.float()
        values_B = logits_BL[:, 0] if self._label is None else logits_BL.softmax(-1)[:, self._label]
        return [float(value) for value in values_B]


def main() -> None:
    """Serve until the parent leaves."""
    link = ParentLink()
    try:
        classifier = Classifier(**asdict(msgspec.convert(link.receive(), ModelSettings)))
    except ConfigError as error:
        link.send({"refused": str(error)})
        return
    link.send({})
    while True:
        batch = msgspec.convert(link.receive(), Batch)
        link.send(msgspec.structs.asdict(BatchScores(classifier.score(batch["items"]))))


if __name__ == "__main__":
    main()
