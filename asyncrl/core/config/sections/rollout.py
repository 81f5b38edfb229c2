"""The rollout services: engine and sampling, agents and environments, evaluation."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, ConfigDict, Field, JsonValue, model_serializer, model_validator

from asyncrl.core.config.gpus import Gpus
from asyncrl.core.config.reading.problems import suggest
from asyncrl.core.config.sections.section import Count, NonNegative, Seconds, Section, Text, refuse
from asyncrl.core.variants import EngineName, engine_names

MAX_TEMPERATURE = 2.0
"""Engines sample at no higher one."""


class GatewaySection(Section):
    """An OpenAI-compatible endpoint in each replica, for agents that bring their own loop (docs/gateway.md).

    Replica n listens on `port` + n of `launcher.host`, or on any free port with 0. A group of sessions
    whose rewards are not all there `session_deadline_s` after its lease is given up.
    """

    port: Annotated[int, Field(ge=0, le=65_000)] = 8100
    """[port] Port of replica 0; replica n listens on port + n. 0 takes free ports."""
    session_deadline_s: Seconds = 600.0
    """[s] Time after the lease until a group without all rewards is given up."""
    max_branches: Count = 4
    """[trajectories] Most of one session; a call with a changed history begins another one."""
    strict: bool = False
    """Whether a sampling parameter that differs from the run's is refused; else the run's replaces it."""
    tool_call_parser: Text | None = None
    """Name of vLLM's parser of tool calls in answers; null for none. For example: hermes"""
    reasoning_parser: Text | None = None
    """Name of vLLM's parser of reasoning in answers, by its name. For example: qwen3"""


def as_environment(value: object) -> object:
    """Return an environment's section; its name may stand alone."""
    return {"name": value} if isinstance(value, str) else value


class EnvironmentSection(Section):
    """Environment that answers the model between its turns: a registered name or `file.py:Class`, with its
    limit of turns. All other keys are the environment's own arguments (docs/environments.md).
    """

    model_config = ConfigDict(frozen=True, extra="allow", strict=False, allow_inf_nan=False)

    name: Text
    """A registered name, or `file.py:Class`. For example: tools"""
    max_turns: Count = 8
    """[turns] Most turns of the model in one episode."""
    branches: Count = 1
    """[trajectories] Of a tree: the others go on from a turn of the first. Divides `rollout.group_size`."""

    @property
    def arguments(self) -> dict[str, object]:
        """Keys beyond the declared fields."""
        return dict(self.model_extra or {})


class ReplicasSection(Section):
    """Number of rollout services, or `{min, max}` for autoscaling."""

    model_config = ConfigDict(json_schema_extra={"required": ["min", "max"]})

    min: NonNegative = 1
    """[replicas] Fewest replicas of an elastic run, and their number at the start."""
    max: NonNegative = 1
    """[replicas] Most replicas of an elastic run."""

    @classmethod
    def fixed(cls, replicas: int) -> ReplicasSection:
        """Return a number that only `asyncrl scale` changes."""
        return cls(min=replicas, max=replicas)

    @property
    def start(self) -> int:
        """Number of replicas at the start of a run."""
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


def check_choice(value: object) -> object:
    """Raise unless `value` is auto, true or false."""
    if isinstance(value, bool) or value == "auto":
        return value
    raise refuse("auto, true or false", "auto is off where runs are to be equal to the bit")


def check_engines(value: object) -> object:
    """Return the name of one engine, or a tuple of several. Raises for an engine that there is not."""
    names, known = tuple(value) if isinstance(value, list | tuple) else (value,), engine_names()
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        wanted = f"one of {', '.join(known)}, or a list of them: replica n takes the n-th, cyclically"
        raise refuse(wanted, suggest(str(unknown[0]), known) if unknown else "")
    return names if len(set(names)) > 1 else names[0]


class RolloutSection(Section):
    """The rollout services. Training samples with the temperature only: no top-p, top-k or penalty.

    With `replicas: {min, max}` a run starts with `min`, adds replicas while the learner waits and removes
    them while data waits. `standby` replicas are loaded and kept in sync in addition, and take over the
    work of one that dies.

    With a list of engines replica n has the n-th, cyclically; `engine_args` then holds arguments by engine.

    `response_tokens` forces response lengths (`lognormal:<sigma>:<median>`), for benchmarks. With
    `prefix_caching` equal prompts share their KV cache within one version, and prompts of one source of
    `data.train` go to the same replicas where they can; a response then depends, in the last digits, on
    earlier requests. `auto` is off where runs are to be equal to the bit (`plan` says why).

    An answer ends at the end of sequence, after one of the strings in `stop`, or cut at `max_tokens`; with
    `truncated: mask` an answer that was cut is not trained, though its reward counts in its group's
    advantages. With `resume_partial` a draining replica returns the tokens of its unfinished answers, and
    another one continues them; episodes of several turns record each one at the buffer, and go on after a
    death too, and agents' sessions once their replica is back. With a `gateway` all answers are generated by
    calls of agents. With an `environment` an episode has several turns, and `max_tokens` is the limit of all
    of them together.
    """

    replicas: Annotated[
        ReplicasSection, BeforeValidator(as_replicas, json_schema_input_type=NonNegative | ReplicasSection)
    ] = ReplicasSection()
    standby: NonNegative = 0
    """[replicas] Additional warm replicas that take over when one dies."""
    gpus: Gpus = 0.0
    """[GPUs] GPUs of each replica, over which its engine is sharded, or a share of one. 0 runs on CPU."""
    cpus: Annotated[float, Field(ge=0)] = 0.25
    """[cores] CPU cores that Ray reserves for each replica."""
    engine: Annotated[EngineName | tuple[EngineName, ...], BeforeValidator(check_engines)] = "vllm"
    """Inference engine (`scripted` is for tests), or a list. For example: vllm, [vllm, sglang]"""
    group_size: Count = 8
    """[trajectories] Trajectories sampled for each prompt."""
    max_tokens: Count = 1024
    """[tokens] Most tokens of an answer; with an environment, of all turns together."""
    temperature: Annotated[float, Field(gt=0, le=MAX_TEMPERATURE)] = 1.0
    """[1] Sampling temperature; the learner applies the same."""
    kv_cache: Literal["recompute", "keep"] = "recompute"
    """Whether the KV cache of running answers is recomputed or kept when weights change."""
    prefix_caching: Annotated[
        bool | Literal["auto"],
        BeforeValidator(check_choice, json_schema_input_type=bool | Literal["auto"]),
    ] = "auto"
    """Whether equal prompts share their KV cache within one version."""
    max_sequences: Count = 128
    """[trajectories] Most trajectories that one engine generates at once."""
    kv_cache_bytes: Annotated[int, Field(ge=1 << 20)] = 256 << 20
    """[bytes] Size of an engine's KV cache on CPU; on GPUs vLLM takes the free memory."""
    quantization: Literal["int8", "fp8"] | None = None
    """Kind that an engine quantises each version to: int8 on CPU, fp8 on GPUs; null keeps `model.dtype`."""
    router_replay: Literal["off", "r3"] = "off"
    """Whether the experts chosen in generation are recorded and chosen again in training."""
    engine_args: dict[str, JsonValue] = Field(default_factory=dict)
    """Arguments of the engine's own; vLLM's `nnodes`, SGLang's `python` too; of several engines by engine.
    For example: {nnodes: 2}, {vllm: {block_size: 32}}"""
    response_tokens: str | None = None
    """Forced distribution of answer lengths, for benchmarks. For example: "lognormal:1.0:200", null"""
    stop: tuple[Text, ...] = ()
    """Strings that end an answer. For example: ["</answer>"]"""
    truncated: Literal["train", "mask"] = "train"
    """Whether answers that were cut at a limit are trained or masked."""
    resume_partial: bool = False
    """Whether another replica continues answers that a draining one began, and turns that one recorded."""
    gateway: GatewaySection | None = None
    """OpenAI-compatible endpoint for agents with their own loop; null for none. For example: {port: 8100}"""
    environment: Annotated[
        EnvironmentSection | None,
        BeforeValidator(as_environment, json_schema_input_type=Text | EnvironmentSection | None),
    ] = None
    """Environment that answers between the model's turns. For example: {name: tools, tools: [calculator]}"""

    @property
    def engines(self) -> tuple[str, ...]:
        """Engines of the first replicas; those after them begin again with the first."""
        return (self.engine,) if isinstance(self.engine, str) else self.engine

    def of_replica(self, index: int) -> Self:
        """Return the section as the replica of that number has it: with one engine, and its arguments."""
        if isinstance(self.engine, str):
            return self
        name = self.engine[index % len(self.engine)]
        return self.model_copy(update={"engine": name, "engine_args": self.engine_args.get(name, {})})

    @property
    def num_nodes(self) -> int:
        """Nodes over which each replica's engine is cut; `engine_args` says it by vLLM's name."""
        asked = self.engine_args.get("nnodes", 1)
        return asked if isinstance(asked, int) and asked > 0 else 1


class EvalSection(Section):
    """Evaluation on held-out prompts, sampled at `temperature`, by replicas pinned to one version.

    Up to `prompts` of each source of `data.eval` are answered `samples` times each. At most `replicas` work
    on one evaluation at once, those that serve its version; the others go on with training.
    """

    every_steps: NonNegative = 0
    """[steps] Steps between evaluations; 0 for none."""
    prompts: Count = 512
    """[prompts] Most prompts of each source."""
    samples: Count = 1
    """[trajectories] Answers to each prompt."""
    replicas: Count = 1
    """[replicas] Most replicas that work on one evaluation."""
    temperature: Annotated[float, Field(ge=0, le=MAX_TEMPERATURE)] = 1.0
    """[1] Sampling temperature; 0 takes the most likely token."""
