"""The rollout services: engine and sampling, agents and environments, evaluation."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, ConfigDict, Field, model_serializer, model_validator

from asyncrl.config.sections.section import Count, NonNegative, Seconds, Section, Text, refuse


class GatewaySection(Section):
    """An OpenAI-compatible endpoint in each replica, for agents that bring their own loop (docs/gateway.md).

    Replica n listens on `port` + n of `launcher.host`, or on any free port with 0. A group of sessions
    whose rewards are not all there `session_deadline_s` after its lease is given up.
    """

    port: Annotated[int, Field(ge=0, le=65_000)] = 8100
    """[port] Of replica 0; the n-th listens on port + n. 0 takes free ones."""
    session_deadline_s: Seconds = 600.0
    """[s] After its lease, a group whose rewards are not all there is given up."""
    strict: bool = False
    """Whether a sampling parameter that differs from the run's is refused; else the run's replaces it."""


def as_environment(value: object) -> object:
    """Return an environment's section; its name may stand alone."""
    return {"name": value} if isinstance(value, str) else value


class EnvironmentSection(Section):
    """What answers the model between its turns: a registered name or `file.py:Class`, and how often the model
    may speak. All else that stands here are the environment's own arguments (docs/environments.md).
    """

    model_config = ConfigDict(frozen=True, extra="allow", strict=False, allow_inf_nan=False)

    name: Text
    """A registered name, or `file.py:Class`. For example: tools"""
    max_turns: Count = 8
    """[turns] How often the model may speak in one episode."""

    @property
    def arguments(self) -> dict[str, Any]:
        """What stands there besides the fields."""
        return dict(self.model_extra or {})


class ReplicasSection(Section):
    """How many rollout services there are: a number, or `{min, max}` between which the run chooses."""

    model_config = ConfigDict(json_schema_extra={"required": ["min", "max"]})

    min: NonNegative = 1
    """[replicas] The fewest that an elastic run keeps; it starts with these."""
    max: NonNegative = 1
    """[replicas] The most that a run adds by itself."""

    @classmethod
    def fixed(cls, replicas: int) -> ReplicasSection:
        """Return a number that only `asyncrl scale` changes."""
        return cls(min=replicas, max=replicas)

    @property
    def start(self) -> int:
        """How many a run starts with."""
        return self.min

    @property
    def is_elastic(self) -> bool:
        """Whether the run scales by itself."""
        return self.max > self.min

    @model_validator(mode="after")
    def check_order(self) -> Self:
        """Check that `max` is not below `min`."""
        if self.max < self.min:
            raise refuse("{min, max} with min <= max", f"Write {self.min} for a fixed number")
        return self

    @model_serializer
    def as_written(self) -> int | dict[str, int]:
        """Return the short form, as a person writes it."""
        return {"min": self.min, "max": self.max} if self.is_elastic else self.min


def as_replicas(value: object) -> object:
    """Return replicas as a section; a number stands for itself. Raises unless both bounds are there."""
    if isinstance(value, ReplicasSection):
        return value
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return {"min": value, "max": value}
    if isinstance(value, dict) and value.keys() >= {"min", "max"}:
        return value
    raise refuse("a whole number of 0 or more, or {min, max}", "")


class RolloutSection(Section):
    """The rollout services. Training samples with the temperature only: no top-p, top-k or penalty.

    With `replicas: {min, max}` a run starts with `min`, adds replicas while the learner waits and takes
    them away while data waits. `standby` replicas besides are loaded and kept in sync, and take over the
    work of one that dies.

    `response_tokens` forces response lengths (`lognormal:<sigma>:<median>`), for benchmarks. With
    `prefix_caching` equal prompts share their KV cache within one version; a response then depends, in the
    last digits, on what ran before it.

    An answer ends at the end of sequence, after one of the strings in `stop`, or cut at `max_tokens`; with
    `truncated: mask` an answer that was cut is not trained, though its reward counts in its group's
    advantages. With `resume_partial` a draining replica hands the tokens of its unfinished answers back,
    and another one goes on from them. With a `gateway` agents generate, and nobody else. With an
    `environment` an episode has several turns, and `max_tokens` is the limit of all of them together.
    """

    replicas: Annotated[
        ReplicasSection, BeforeValidator(as_replicas, json_schema_input_type=NonNegative | ReplicasSection)
    ] = ReplicasSection()
    standby: NonNegative = 0
    """[replicas] Warm spares besides, loaded and in sync but without work until one dies."""
    gpus: NonNegative = 0
    """[GPUs] Of each replica; its engine is cut over them. 0 runs on CPU."""
    cpus: Annotated[float, Field(ge=0)] = 0.25
    """[cores] That Ray reserves for each replica."""
    engine: Literal["vllm", "scripted"] = "vllm"
    """What generates: vLLM, or a script for tests and simulations."""
    group_size: Count = 8
    """[trajectories] Sampled for each prompt."""
    max_tokens: Count = 1024
    """[tokens] An answer is cut there; with an environment, all turns together."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """[1] Of sampling; the learner applies the same."""
    kv_cache: Literal["recompute", "keep"] = "recompute"
    """What becomes of a running answer's cache at new weights: computed again, or kept."""
    prefix_caching: bool = False
    """Whether equal prompts share their cache within one version."""
    max_sequences: Count = 128
    """[trajectories] That one engine works on at once."""
    kv_cache_bytes: Annotated[int, Field(ge=1 << 20)] = 256 << 20
    """[bytes] Of an engine's cache on CPU; on GPUs vLLM takes what is free."""
    response_tokens: str | None = None
    """Forces lengths of answers, for benchmarks. For example: "lognormal:1.0:200", null"""
    stop: tuple[Text, ...] = ()
    """Strings that end an answer. For example: ["</answer>"]"""
    truncated: Literal["train", "mask"] = "train"
    """Whether an answer that was cut at a limit is trained."""
    resume_partial: bool = False
    """Whether another replica goes on with the unfinished answers of one that leaves."""
    gateway: GatewaySection | None = None
    """Endpoint for agents with a loop of their own; null for none. For example: {port: 8100}"""
    environment: Annotated[
        EnvironmentSection | None,
        BeforeValidator(as_environment, json_schema_input_type=Text | EnvironmentSection | None),
    ] = None
    """What answers between the model's turns. For example: {name: tools, tools: [calculator]}"""


class EvalSection(Section):
    """Evaluation on held-out prompts, sampled at `temperature`, by replicas pinned to one version.

    Up to `prompts` of each source of `data.eval` are answered `samples` times each. At most `replicas` work
    on one evaluation at once, those that serve its version; the others go on with training.
    """

    every_steps: NonNegative = 0
    """[steps] Between evaluations; 0 for none."""
    prompts: Count = 512
    """[prompts] Of each source, at most."""
    samples: Count = 1
    """[trajectories] For each prompt."""
    replicas: Count = 1
    """[replicas] That work on one evaluation at once, at most."""
    temperature: Annotated[float, Field(ge=0)] = 1.0
    """[1] Of sampling; 0 takes the likeliest token."""
