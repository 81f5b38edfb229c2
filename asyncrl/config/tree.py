"""The configuration tree: every knob of a run, at most three levels deep.

Each field stands here because something reads it. Values are checked as they enter; what spans
several sections is checked by `Config`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

Count = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Text = Annotated[str, Field(min_length=1)]
NonNegativeNumber = Annotated[float, Field(ge=0)]
Decay = Annotated[float, Field(ge=0, lt=1)]
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$"
CONFLICT = "conflict"
"""The type of the validation error that carries `Conflict`s in its context."""


@dataclass(frozen=True)
class Conflict:
    """Values that do not fit together: their keys, what is wrong, what to do."""

    keys: tuple[str, ...]
    what: str
    hint: str = ""


class Section(BaseModel):
    """A part of the tree: frozen, and closed against unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=False, allow_inf_nan=False)


class RunSection(Section):
    """Names the run; everything that it writes goes to `<dir>/<name>`."""

    name: Annotated[str, Field(pattern=NAME_PATTERN)] = "run"
    dir: Text = "runs"
    seed: NonNegative = 0


class ModelSection(Section):
    """The policy: a Hugging Face folder, a hub id, or `builtin:digit_sort`."""

    path: Text
    revision: str | None = None
    dtype: Literal["float32", "bfloat16"] = "bfloat16"


class DataSection(Section):
    """Prompts: Parquet or jsonl files, or `builtin:digit_sort`."""

    train: Text
    eval: Text | None = None
    max_prompt_tokens: Count = 512
    shuffle: bool = True


class RewardSection(Section):
    """`fn` is a registered name or `file.py:function`."""

    fn: Text


class RolloutSection(Section):
    """The rollout services. Training samples with the temperature only: no top-p, top-k or penalty.

    `response_tokens` forces response lengths (`lognormal:<sigma>:<median>`), for benchmarks.
    """

    replicas: NonNegative = 1
    gpus: NonNegative = 0
    cpus: Annotated[float, Field(ge=0)] = 0.25
    engine: Literal["vllm", "scripted"] = "vllm"
    group_size: Count = 8
    max_tokens: Count = 1024
    temperature: Annotated[float, Field(gt=0)] = 1.0
    kv_cache: Literal["recompute", "keep"] = "recompute"
    max_sequences: Count = 128
    kv_cache_bytes: Annotated[int, Field(ge=1 << 20)] = 256 << 20
    response_tokens: str | None = None


class StalenessSection(Section):
    """The bound on lag, per token, and what happens to a token beyond it."""

    max_lag: NonNegative = 4
    policy: Literal["mask"] = "mask"
    ready_batches: Count = 1


class BufferSection(Section):
    """The experience buffer."""

    journal: Literal["none", "file"] = "file"
    fsync: Literal["everysec", "always", "never"] = "everysec"
    memory_bytes: Annotated[int, Field(ge=1 << 20)] = 1 << 30
    lease_s: Seconds = 60.0
    max_attempts: Count = 3


class AlgorithmSection(Section):
    """Advantage, loss and off-policy correction."""

    advantage: str = "grpo"
    loss: str = "vanilla"
    clip: tuple[NonNegativeNumber, NonNegativeNumber] = (0.2, 0.28)
    dual_clip: Annotated[float, Field(gt=1)] = 3.0
    aggregation: Literal[
        "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"
    ] = "token-mean"
    correction: str = "decoupled_token_is"
    is_threshold: Annotated[float, Field(gt=0)] = 2.0
    veto: Annotated[float, Field(ge=0)] = 1e-4
    drop_constant_groups: bool = True


class LearnerSection(Section):
    """The learner. One step trains `groups_per_step` groups in `minibatches` optimizer updates."""

    backend: Literal["megatron"] = "megatron"
    tp: Count = 1
    dp: Count = 1
    gpus: NonNegative = 0
    cpus: Annotated[float, Field(ge=0)] = 1.0
    groups_per_step: Count = 16
    minibatches: Count = 1
    max_tokens_per_microbatch: Count = 16384
    lr: Annotated[float, Field(gt=0)] = 1e-6
    warmup_steps: NonNegative = 0
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    grad_clip: Annotated[float, Field(gt=0)] = 1.0
    steps: Count = 200


class WeightSyncSection(Section):
    """How new weights reach the replicas."""

    backend: Literal["auto", "gloo", "nccl"] = "auto"
    parallelism: Count = 1
    deadline_s: Seconds = 60.0
    bucket_bytes: Annotated[int, Field(ge=1 << 10)] = 64 << 20


class EvalSection(Section):
    """Evaluation on held-out prompts, sampled at `temperature`, by a replica pinned to one version."""

    every_steps: NonNegative = 0
    prompts: Count = 512
    temperature: Annotated[float, Field(ge=0)] = 1.0


class CheckpointSection(Section):
    """Atomic checkpoints of the learner; `keep` newest stay."""

    every_steps: Count = 20
    keep: Count = 3


class MetricsSection(Section):
    """Where metrics go besides `metrics.jsonl`."""

    tensorboard: bool = True


class LauncherSection(Section):
    """`ray: local` starts Ray on this machine. `api_port: 0` takes a free port for the control API."""

    ray: Literal["local"] = "local"
    api_port: Annotated[int, Field(ge=0, le=65535)] = 0
    start_deadline_s: Seconds = 300.0


class Config(Section):
    """A run, whole."""

    run: RunSection = RunSection()
    model: ModelSection
    data: DataSection
    reward: RewardSection
    rollout: RolloutSection = RolloutSection()
    staleness: StalenessSection = StalenessSection()
    buffer: BufferSection = BufferSection()
    algorithm: AlgorithmSection = AlgorithmSection()
    learner: LearnerSection = LearnerSection()
    weight_sync: WeightSyncSection = WeightSyncSection()
    eval: EvalSection = EvalSection()
    checkpoint: CheckpointSection = CheckpointSection()
    metrics: MetricsSection = MetricsSection()
    launcher: LauncherSection = LauncherSection()

    @model_validator(mode="after")
    def check_sections_fit(self) -> Self:
        """Check what no section can know alone."""
        conflicts = find_conflicts(self)
        if conflicts:
            text = "; ".join(conflict.what for conflict in conflicts)
            raise PydanticCustomError(CONFLICT, "{text}", {"text": text, "conflicts": conflicts})
        return self


def find_conflicts(config: Config) -> list[Conflict]:
    """Return every pair of values that is right by itself and wrong together."""
    learner, conflicts = config.learner, []
    if learner.groups_per_step % learner.minibatches:
        conflicts.append(
            Conflict(
                ("learner.minibatches", "learner.groups_per_step"),
                f"learner.groups_per_step ({learner.groups_per_step}) must be a multiple of "
                f"learner.minibatches ({learner.minibatches})",
            )
        )
    if learner.groups_per_step // learner.minibatches < learner.dp:
        conflicts.append(
            Conflict(
                ("learner.dp", "learner.minibatches", "learner.groups_per_step"),
                f"a minibatch of {learner.groups_per_step // learner.minibatches} groups cannot be shared by "
                f"learner.dp ({learner.dp}) ranks",
            )
        )
    if config.eval.every_steps and config.data.eval is None:
        conflicts.append(
            Conflict(
                ("eval.every_steps", "data.eval"),
                "eval.every_steps is set, but data.eval names no prompts",
                "Set data.eval, or eval.every_steps: 0",
            )
        )
    if config.weight_sync.backend == "nccl" and not (config.rollout.gpus and learner.gpus):
        conflicts.append(
            Conflict(
                ("weight_sync.backend", "rollout.gpus", "learner.gpus"),
                "weight_sync.backend: nccl needs GPUs on both sides",
                "Set rollout.gpus and learner.gpus, or weight_sync.backend: gloo",
            )
        )
    return conflicts
