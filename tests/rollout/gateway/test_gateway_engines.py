"""The same calls to gateways over vLLM and over SGLang: the answers differ in what was sampled alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.rollout.gateway.gateway_parts import ON_SGLANG, Served, Stage, open_gateway_stage

pytestmark = [*ON_SGLANG.marks]
TOLERANCE = 1e-5
NUM_TOP = 5
PROMPTS = ("Wie geht es Dir?", "a", "Ja. Ja. Ja. Ja.", "0123456789 und so weiter, bis zum Ende", "日本語")
IDS = {"return_tokens_as_token_ids": True, "return_token_ids": True}


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Stage]]:
    """vLLM's, then SGLang's, with the same weights."""
    folder = tmp_path_factory.mktemp("engines")
    with open_gateway_stage(folder / "vllm") as first:
        with open_gateway_stage(folder / "sglang", served=Served(engine="sglang")) as second:
            yield [first, second]


def ask(stage: Stage, api: str, prompt: str) -> Any:
    """Return the only choice of an answer of one token, a stream's parts as a list."""
    agent = stage.open()
    more: dict[str, Any] = {"max_tokens": 1, "extra_body": IDS}
    if api == "completion":
        found = [agent.complete(prompt, logprobs=NUM_TOP, **more)]
    else:
        more |= {"top_logprobs": NUM_TOP, "stream": api == "stream"}
        said = agent.chat({"role": "user", "content": prompt}, **more)
        found = [*said] if api == "stream" else [said]
    agent.stage.post("/reward", {"error": "enough seen"}, agent.key)
    return [choice.model_dump() for one in found for choice in one.choices]


def shape_of(value: Any) -> Any:
    """Return the keys and types of an answer; bytes and ids may be any number."""
    if isinstance(value, dict):
        return {key: shape_of(one) for key, one in value.items()}
    is_table = isinstance(value, list) and any(isinstance(one, dict) for one in value)
    return [shape_of(one) for one in value] if is_table else type(value)


def take_tops(choices: Any) -> dict[str, float]:
    """Take the most probable tokens out of an answer: one less than asked for, as one may be the sampled."""
    (logprobs,) = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    if "top_logprobs" in logprobs:
        (tops,) = logprobs.pop("top_logprobs")
    else:
        (position,) = logprobs["content"]
        assert len(position["top_logprobs"]) == NUM_TOP
        tops = {one["token"]: one["logprob"] for one in position["top_logprobs"]}
    return dict(sorted(tops.items(), key=lambda top: -top[1])[: NUM_TOP - 1])


@pytest.mark.parametrize("api", ["chat", "stream", "completion"])
def test_the_most_probable_tokens_are_those_of_vllm_in_its_form(stages: list[Stage], api: str):
    seen = set()
    for prompt in PROMPTS:
        of_vllm, of_sglang = (ask(stage, api, prompt) for stage in stages)
        wanted, found = take_tops(of_vllm), take_tops(of_sglang)
        assert list(found) == list(wanted) and len(found) == NUM_TOP - 1
        assert max(abs(found[token] - wanted[token]) for token in wanted) < TOLERANCE
        assert shape_of(of_sglang) == shape_of(of_vllm)
        seen.add(tuple(wanted.items()))
    assert len(seen) == len(PROMPTS), "the model tells one prompt from the other"
