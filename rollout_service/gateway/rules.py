"""Rules of the gateway: which fields of a request have an effect, and which the run's own values replace.

Training needs answers drawn with the run's temperature alone, with a seed and a log-prob for each token. A
field that vLLM's own server takes is never refused for that: where it would change how tokens are drawn, or
which are possible, it is replaced, counted and named to the client; `strict` refuses it. Invariant: the
sampling parameters that reach the engine are made here, field by field.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass

from rollout_service.engine.vllm.objects import AskedSampling
from rollout_service.gateway.conversation.transcript import Transcript
from rollout_service.gateway.refusal import Refusal

FREE = frozenset(
    {
        "model", "messages", "prompt", "input", "system", "instructions",
        "max_tokens", "max_completion_tokens", "max_output_tokens",
        "stop", "stop_token_ids", "stop_sequences", "stream", "stream_options", "logprobs", "top_logprobs",
        "return_token_ids", "return_tokens_as_token_ids", "return_prompt_text",
        "tools", "parallel_tool_calls", "max_tool_calls", "chat_template", "chat_template_kwargs",
        "documents", "reasoning", "reasoning_effort", "include_reasoning", "thinking", "include",
        "continue_final_message", "add_generation_prompt", "add_special_tokens",
        "user", "metadata", "store", "background", "previous_response_id", "service_tier",
        "prompt_cache_key",
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
    "response_format": ({"type": "text"},),
    "text": ({"format": {"type": "text"}},),
    "truncation": ("disabled",),
    "tool_choice": ("auto", "none", {"type": "auto"}, {"type": "none"}),
    "temperature": (),
    "seed": (),
}
"""Values that mean the same as leaving the field out. Of other fields those are nothing, 0 and False."""
STRICT = "tools.strict"
"""Stands for `strict: true` of a tool, to whose schema vLLM's server binds the calls."""
FORCED = "a call that the model is made to write is none that it chose"
WHY = {
    "temperature": "every answer is sampled at the run's temperature, {temperature:g}",
    "seed": "seeds follow from the run, the ticket and the turn",
    "n": "a session is one trajectory: open another one for another answer",
    "best_of": "a session is one trajectory: open another one for another answer",
    "tool_choice": FORCED,
    STRICT: FORCED,
}
OTHERWISE = "answers are sampled with the run's temperature alone, or their log-probs could not be trained on"


@dataclass(frozen=True)
class Rules:
    """Sampling rules of the run.

    Attributes:
        max_tokens: Most tokens of a trajectory after its prompt, all turns and observations together.
        max_prompt_tokens: Most tokens of a session's first prompt.
        max_branches: Most trajectories of a session.
        masks_cut: A trajectory whose last answer was cut at the limit is not trained.
        is_strict: A sampling parameter that differs from the run's is refused, not replaced.
    """

    run_seed: int
    group_size: int
    temperature: float
    max_tokens: int
    max_prompt_tokens: int
    max_branches: int = 1
    masks_cut: bool = False
    is_strict: bool = False


def find_replaced(body: Mapping[str, object], known: Set[str], rules: Rules) -> tuple[str, ...]:
    """Return which of the request's fields the run's values replace, sorted; `STRICT` is one too.

    Args:
        known: Fields of the API; vLLM ignores others.

    Raises:
        Refusal: The gateway is strict. Names the first such field, and why.
    """
    replaced = sorted(
        name
        for name, value in body.items()
        if name in known and name not in FREE and not _says_nothing(name, value, rules)
    )
    if not known.isdisjoint({"tools"}) and _has_strict_tool(body.get("tools")):
        replaced = sorted([*replaced, STRICT])
    if replaced and rules.is_strict:
        why = WHY.get(replaced[0], OTHERWISE).format(temperature=rules.temperature)
        what = f"'{replaced[0]}' cannot be {body.get(replaced[0], True)!r:.60}: {why}"
        raise Refusal(what, code="not_trainable")
    return tuple(replaced)


def _has_strict_tool(tools: object) -> bool:
    """Tell whether a tool is strict, written as chats have tools or as the other APIs."""
    found = [tool for tool in tools if isinstance(tool, Mapping)] if isinstance(tools, list) else []
    inner = [tool.get("function") for tool in found]
    return any(isinstance(one, Mapping) and one.get("strict") is True for one in (*found, *inner))


def _says_nothing(name: str, value: object, rules: Rules) -> bool:
    if value is None or (name == "temperature" and value == rules.temperature):
        return True
    if name == "output_config" and isinstance(value, dict):
        return not value.get("format")
    if name in NEUTRAL:
        return value in NEUTRAL[name]
    return not value


def room_of(rules: Rules, transcript: Transcript, prompt_ids: tuple[int, ...]) -> int:
    """Return how many tokens an answer to `prompt_ids` may have. Raises Refusal if it is none."""
    num_first = len(transcript.first_prompt if transcript.answers else prompt_ids)
    if num_first > rules.max_prompt_tokens:
        raise Refusal(
            f"the prompt has {num_first} tokens, over data.max_prompt_tokens ({rules.max_prompt_tokens})",
            code="context_length_exceeded",
        )
    room = rules.max_tokens - (len(prompt_ids) - num_first)
    if room < 1 or not prompt_ids:
        raise Refusal(
            f"the session has no room left: {rules.max_tokens} tokens after its first prompt",
            hint="Post its reward, or raise rollout.max_tokens",
            code="context_length_exceeded",
        )
    return room


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
        skip_special_tokens=asked.skip_special_tokens,  # parsers look for some
        spaces_between_special_tokens=asked.spaces_between_special_tokens,  # and for some side by side
        output_kind=RequestOutputKind.DELTA if is_streamed else RequestOutputKind.FINAL_ONLY,
    )
