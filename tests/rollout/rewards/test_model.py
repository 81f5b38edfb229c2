"""A reward model in its own process: batches, errors of single answers, and a process that dies."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForSequenceClassification

from asyncrl.core.errors import ConfigError
from rollout_service.data.prompts import Prompt
from rollout_service.rewards.score import RewardError, Score
from rollout_service.rewards.served.messages import ModelSettings
from rollout_service.rewards.served.model import ModelReward
from rollout_service.rewards.served.processes.model_process import Classifier
from rollout_service.tasks.tiny_text import build_tokenizer
from tests.rollout.rewards.judging import answer

CHAT = Prompt(1, ({"role": "user", "content": "hello"},), "", "", {})
RESPONSES = ("a", "a much longer answer than the others", "!", "a")


def write_model(folder: Path, num_labels: int = 1) -> PreTrainedModel:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=300,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=128,
        num_labels=num_labels,
        pad_token_id=0,
    )
    model = Qwen3ForSequenceClassification(config).eval()
    torch.nn.init.normal_(model.score.weight, std=1.0)
    model.save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return model


def scores_alone(model: PreTrainedModel, label: int | None = None) -> list[float]:
    """What the model says of each answer by itself, without padding."""
    tokenizer, values = build_tokenizer(), []
    for response in RESPONSES:
        messages = [*CHAT.content, {"role": "assistant", "content": response}]
        ids = tokenizer(tokenizer.apply_chat_template(messages, tokenize=False), return_tensors="pt")
        with torch.inference_mode():
            logits = model(ids["input_ids"]).logits[0]
        values.append(float(logits[0] if label is None else logits.softmax(-1)[label]))
    return values


def test_a_model_scores_answers_in_batches_as_it_does_one_by_one_and_a_long_one_fails_alone(tmp_path: Path):
    wanted = scores_alone(write_model(tmp_path, num_labels=3), label=1)
    reward = ModelReward("judge", ModelSettings(str(tmp_path), label=1), batch=3, deadline_s=120.0)

    async def run() -> list[float | BaseException]:
        await reward.start()
        try:
            calls = [reward.value(answer(response, CHAT)) for response in (*RESPONSES, "x" * 200)]
            found = await asyncio.gather(*calls, return_exceptions=True)
            return [one.value if isinstance(one, Score) else one for one in found]
        finally:
            await reward.close()

    *found, long = asyncio.run(run())
    assert found == pytest.approx(wanted, abs=1e-5)
    assert len({round(score, 5) for score in found}) == 3, "in another batch the last bits may differ"
    assert isinstance(long, RewardError) and long.kind == "refused"
    assert "the model takes 1 to 128" in long.message
    assert reward.child_pids() == []


def test_an_answer_that_the_model_cannot_read_fails_alone(tmp_path: Path):
    model = write_model(tmp_path)
    wanted = scores_alone(model)[0]
    tokenizer = build_tokenizer()
    refusal = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    tokenizer.chat_template = refusal + str(tokenizer.chat_template)
    tokenizer.save_pretrained(tmp_path)
    items = [{"prompt": [{"role": role, "content": "hello"}], "response": "a"} for role in ("user", "system")]
    good, bad = Classifier(str(tmp_path), None, "cpu", "float32").score(items)
    assert good == pytest.approx(wanted, abs=1e-5)
    assert bad == ("refused", "it cannot be written as text: TemplateError: no system role")


def test_a_prompt_that_has_no_utf8_fails_alone(tmp_path: Path):
    reward = ModelReward("judge", ModelSettings(str(tmp_path)))
    with pytest.raises(RewardError, match="row 3 cannot be handed to the reward 'judge'"):
        asyncio.run(reward.value(answer(prompt=Prompt(3, "\ud800", "", "", {}))))


@pytest.mark.long
def test_a_model_whose_process_dies_or_hangs_fails_what_it_had_and_starts_again(tmp_path: Path):
    wanted = scores_alone(write_model(tmp_path))
    reward = ModelReward("judge", ModelSettings(str(tmp_path)), deadline_s=60.0)

    async def fail(signal_number: int) -> str:
        (pid,) = reward.child_pids()
        os.kill(pid, signal_number)
        with pytest.raises(RewardError) as caught:
            await reward.value(answer("a", CHAT))
        return caught.value.kind

    async def run() -> None:
        await reward.start()
        try:
            assert (await reward.value(answer("a", CHAT))).value == pytest.approx(wanted[0], abs=1e-5)
            assert await fail(signal.SIGSTOP) == "timeout"
            assert (await reward.value(answer("!", CHAT))).value == pytest.approx(wanted[2], abs=1e-5)
            (pid,) = reward.child_pids()
            os.kill(pid, signal.SIGKILL)
            while reward.child_pids():
                await asyncio.sleep(0.01)
            assert (await reward.value(answer("a", CHAT))).value == pytest.approx(wanted[0], abs=1e-5)
        finally:
            await reward.close()

    asyncio.run(run())


@pytest.mark.long
@pytest.mark.parametrize(
    ("num_labels", "label", "said"),
    [(1, 0, "has 1 labels. Leave"), (3, None, "Set `label`, 0 to 2"), (3, 3, "Set")],
)
def test_a_model_with_other_labels_is_a_config_error(
    tmp_path: Path, num_labels: int, label: int | None, said: str
):
    write_model(tmp_path, num_labels)
    with pytest.raises(ConfigError, match=said):
        asyncio.run(ModelReward("judge", ModelSettings(str(tmp_path), label)).start())
