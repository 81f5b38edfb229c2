"""Rules of the gateway: which fields of a request are taken, replaced by the run's, or refused.

Training needs answers drawn with the run's temperature alone, with a seed and a log-prob for each token.
A parameter that only says how tokens are drawn is replaced; one that the agent's own code depends on (the
form of the answer, or which tokens are possible) is refused. Invariant: the sampling parameters that reach
the engine are made here, field by field.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rollout_service.engine.vllm.objects import AskedSampling
from rollout_service.gateway.refusal import Refusal

FREE = frozenset(
    {
        "model", "messages", "prompt", "max_tokens", "max_completion_tokens", "stop", "stop_token_ids",
        "stream", "stream_options", "logprobs", "top_logprobs", "return_token_ids", "chat_template_kwargs",
        "tools", "tool_choice", "user", "metadata", "store", "parallel_tool_calls", "service_tier",
    }
)  # fmt: skip
"""Fields that change nothing about how tokens are drawn."""
NEUTRAL: Mapping[str, tuple[object, ...]] = {
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
SAMPLING = frozenset(
    {
        "temperature", "seed", "top_p", "n", "best_of", "top_k", "min_p", "presence_penalty",
        "frequency_penalty", "repetition_penalty",
    }
)  # fmt: skip
"""Fields that only say how tokens are drawn, and how often: the run's values stand in for them."""
FREE_TOOL_CHOICES = (None, "auto", "none")
WHY = {
    "temperature": "every answer is sampled at the run's temperature, {temperature:g}",
    "seed": "seeds follow from the run, the ticket and the turn",
    "n": "a session is one trajectory: open another one for another answer",
    "best_of": "a session is one trajectory: open another one for another answer",
    "tool_choice": "tool calls are not parsed here: send 'auto' or 'none', and read the call from the text",
}
OTHERWISE = "answers are sampled with the run's temperature alone, or their log-probs could not be trained on"


@dataclass(frozen=True)
class Rules:
    """Sampling rules of the run.

    Attributes:
        max_tokens: Most tokens of a trajectory after its prompt, all turns and observations together.
        max_prompt_tokens: Most tokens of a session's first prompt.
        masks_cut: A trajectory whose last answer was cut at the limit is not trained.
        is_strict: A sampling parameter that differs from the run's is refused, not replaced.
    """

    run_seed: int
    group_size: int
    temperature: float
    max_tokens: int
    max_prompt_tokens: int
    masks_cut: bool = False
    is_strict: bool = False


@dataclass(frozen=True)
class Admitted:
    """A request that passed the rules.

    Attributes:
        body: Body for vLLM: the request without the replaced parameters.
        overridden: Names of the replaced parameters, sorted.
    """

    body: Mapping[str, object]
    overridden: tuple[str, ...] = ()


def admit(body: Mapping[str, object], rules: Rules) -> Admitted:
    """Return the request as vLLM gets it, and which sampling parameters the run's values replace.

    vLLM parses no tool calls for the gateway, so a free `tool_choice` becomes `none`, with which vLLM still
    hands the tools to the chat template.

    Raises:
        Refusal: Names the first field that cannot be taken, and why.
    """
    overridden = set()
    for name, value in body.items():
        if name in FREE or _says_nothing(name, value, rules):
            continue
        if name not in SAMPLING or rules.is_strict:
            why = WHY.get(name, OTHERWISE).format(temperature=rules.temperature)
            raise Refusal(f"'{name}' cannot be {value!r:.60}: {why}", code="not_trainable")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise Refusal(f"'{name}' must be a number, not {value!r:.60}")
        overridden.add(name)
    if body.get("tool_choice") not in FREE_TOOL_CHOICES:
        what = f"'tool_choice' cannot be {body['tool_choice']!r:.60}: {WHY['tool_choice']}"
        raise Refusal(what, code="not_trainable")
    kept = {name: value for name, value in body.items() if name not in {*overridden, "tool_choice"}}
    if kept.get("tools"):
        kept["tool_choice"] = "none"
    return Admitted(kept, tuple(sorted(overridden)))


def _says_nothing(name: str, value: object, rules: Rules) -> bool:
    if value is None or (name == "temperature" and value == rules.temperature):
        return True
    if name in NEUTRAL:
        return value in NEUTRAL[name]
    return not value


def sampling_params(asked: AskedSampling, rules: Rules, seed: int, max_tokens: int) -> object:
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
