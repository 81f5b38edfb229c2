"""What an agent may ask of the model, and what it gets whatever it asks for.

Training needs answers drawn with the run's temperature alone, with a seed and a log-prob for each token.
Owns the list of what a request may say. Invariant: the parameters that reach the engine are made here,
field by field; a parameter that nobody named here reaches it never.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rollout_service.gateway.refusal import Refusal

FREE = frozenset(
    {
        "model", "messages", "prompt", "max_tokens", "max_completion_tokens", "stop", "stop_token_ids",
        "stream", "stream_options", "logprobs", "top_logprobs", "return_token_ids", "chat_template_kwargs",
        "tools", "tool_choice", "user", "metadata", "store", "parallel_tool_calls", "service_tier",
    }
)  # fmt: skip
"""Fields that change nothing about how tokens are drawn."""
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "top_p": (1,),
    "top_k": (-1, 0),
    "n": (1,),
    "best_of": (1,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "add_generation_prompt": (True,),
    "include_reasoning": (True,),
    "response_format": ({"type": "text"},),
    "temperature": (),
    "seed": (),
}
"""Values that mean the same as leaving the field out. Of other fields those are nothing, 0 and False."""
WHY = {
    "temperature": "every answer is sampled at the run's temperature, {temperature:g}",
    "seed": "seeds follow from the run, the ticket and the turn",
    "n": "a session is one trajectory: open another one for another answer",
    "best_of": "a session is one trajectory: open another one for another answer",
    "tool_choice": "tool calls are not parsed here: send tool_choice 'none' and read them from the text",
}
OTHERWISE = "answers are sampled with the run's temperature alone, or their log-probs could not be trained on"


@dataclass(frozen=True)
class Rules:
    """How the run samples.

    Attributes:
        max_tokens: Most tokens of a trajectory after its prompt, all turns and observations together.
        max_prompt_tokens: Most tokens of a session's first prompt.
        masks_cut: A trajectory whose last answer was cut at the limit is not trained.
    """

    run_seed: int
    group_size: int
    temperature: float
    max_tokens: int
    max_prompt_tokens: int
    masks_cut: bool = False


def check_request(body: Mapping[str, Any], rules: Rules) -> None:
    """Return if `body` asks for nothing that training cannot take.

    Raises:
        Refusal: With the first field that does, and why.
    """
    for name, value in body.items():
        if name not in FREE and not _says_nothing(name, value, rules):
            why = WHY.get(name, OTHERWISE).format(temperature=rules.temperature)
            raise Refusal(f"'{name}' cannot be {value!r:.60}: {why}", code="not_trainable")
    if body.get("tools") and body.get("tool_choice") != "none":
        raise Refusal(f"'tool_choice' must be 'none': {WHY['tool_choice']}", code="not_trainable")


def _says_nothing(name: str, value: Any, rules: Rules) -> bool:
    if value is None or (name == "temperature" and value == rules.temperature):
        return True
    if name in NEUTRAL:
        return value in NEUTRAL[name]
    return not value


def sampling_params(asked: Any, rules: Rules, seed: int, max_tokens: int) -> Any:
    """Return vLLM's SamplingParams: of what the client `asked`, only how an answer ends and is shown."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    is_streamed = asked.output_kind is RequestOutputKind.DELTA
    return SamplingParams(
        temperature=rules.temperature,
        seed=seed,
        max_tokens=max_tokens,
        stop=list(asked.stop or ()),
        stop_token_ids=list(asked.stop_token_ids or ()),
        logprobs=max(asked.logprobs or 0, 0),
        output_kind=RequestOutputKind.DELTA if is_streamed else RequestOutputKind.FINAL_ONLY,
    )
