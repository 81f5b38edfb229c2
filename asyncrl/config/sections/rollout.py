"""The rollout services: engine and sampling, agents and environments, evaluation."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field

from asyncrl.config.sections.section import Count, NonNegative, Seconds, Section, Text


class GatewaySection(Section):
    """An OpenAI-compatible endpoint in each replica, for agents that bring their own loop (docs/gateway.md).

    Replica n listens on `port` + n of `launcher.host`, or on any free port with 0. A group of sessions
    whose rewards are not all there `session_deadline_s` after its lease is given up.
    """

    port: Annotated[int, Field(ge=0, le=65_000)] = 8100
    session_deadline_s: Seconds = 600.0


def as_environment(value: object) -> object:
    """Return an environment's section; its name may stand alone."""
    return {"name": value} if isinstance(value, str) else value


class EnvironmentSection(Section):
    """What answers the model between its turns: a registered name or `file.py:Class`, and how often the model
    may speak. All else that stands here are the environment's own arguments (docs/environments.md).
    """

    model_config = ConfigDict(frozen=True, extra="allow", strict=False, allow_inf_nan=False)

    name: Text
    max_turns: Count = 8

    @property
    def arguments(self) -> dict[str, Any]:
        """What stands there besides the fields."""
        return dict(self.model_extra or {})


class RolloutSection(Section):
    """The rollout services. Training samples with the temperature only: no top-p, top-k or penalty.

    `response_tokens` forces response lengths (`lognormal:<sigma>:<median>`), for benchmarks. With
    `prefix_caching` equal prompts share their KV cache within one version; a response then depends, in the
    last digits, on what ran before it.

    An answer ends at the end of sequence, after one of the strings in `stop`, or cut at `max_tokens`; with
    `truncated: mask` an answer that was cut is not trained, though its reward counts in its group's
    advantages. With `resume_partial` a draining replica hands the tokens of its unfinished answers back,
    and another one goes on from them. With a `gateway` agents generate, and nobody else. With an
    `environment` an episode has several turns, and `max_tokens` is the limit of all of them together.
    """

    replicas: NonNegative = 1
    gpus: NonNegative = 0
    cpus: Annotated[float, Field(ge=0)] = 0.25
    engine: Literal["vllm", "scripted"] = "vllm"
    group_size: Count = 8
    max_tokens: Count = 1024
    temperature: Annotated[float, Field(gt=0)] = 1.0
    kv_cache: Literal["recompute", "keep"] = "recompute"
    prefix_caching: bool = False
    max_sequences: Count = 128
    kv_cache_bytes: Annotated[int, Field(ge=1 << 20)] = 256 << 20
    response_tokens: str | None = None
    stop: tuple[Text, ...] = ()
    truncated: Literal["train", "mask"] = "train"
    resume_partial: bool = False
    gateway: GatewaySection | None = None
    environment: Annotated[EnvironmentSection | None, BeforeValidator(as_environment)] = None


class EvalSection(Section):
    """Evaluation on held-out prompts, sampled at `temperature`, by replicas pinned to one version.

    Up to `prompts` of each source of `data.eval` are answered `samples` times each. At most `replicas` work
    on one evaluation at once, those that serve its version; the others go on with training.
    """

    every_steps: NonNegative = 0
    prompts: Count = 512
    samples: Count = 1
    replicas: Count = 1
    temperature: Annotated[float, Field(ge=0)] = 1.0
