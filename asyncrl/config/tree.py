"""The configuration tree: every knob of a run, at most three levels deep.

Each field stands here because something reads it. Values are checked as they enter; what spans
several sections is checked by `Config`.
"""

from __future__ import annotations

from ipaddress import IPv4Address
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from asyncrl.config.conflicts import CONFLICT, find_conflicts
from asyncrl.metrics import find, unknown_names

Count = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Text = Annotated[str, Field(min_length=1)]
NonNegativeNumber = Annotated[float, Field(ge=0)]
Decay = Annotated[float, Field(ge=0, lt=1)]
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$"
EVALUATION_METRICS = ("accuracy", "reward_mean")
"""What an evaluation says, the higher the better."""


class Section(BaseModel):
    """A part of the tree: frozen, and closed against unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=False, allow_inf_nan=False)


class RunSection(Section):
    """Names the run; everything that it writes goes to `<dir>/<name>`."""

    name: Annotated[str, Field(pattern=NAME_PATTERN)] = "run"
    dir: Text = "runs"
    seed: NonNegative = 0


class ModelSection(Section):
    """The policy: a Hugging Face folder, a hub id, or `builtin:digit_sort`.

    `dtype` is that of the computation; the optimizer keeps float32. `float16` is for GPUs without
    bfloat16: losses are scaled, and an update whose gradient overflows is computed again.
    """

    path: Text
    revision: str | None = None
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"


class DataSection(Section):
    """Prompts: Parquet or jsonl files, or `builtin:digit_sort`."""

    train: Text
    eval: Text | None = None
    max_prompt_tokens: Count = 512
    shuffle: bool = True


class RewardSection(Section):
    """`fn` is a registered name or `file.py:function`.

    An answer that reaches into the last `overlong_buffer_tokens` before `rollout.max_tokens` loses up to
    `overlong_penalty`, in proportion (DAPO, arXiv 2503.14476); 0 tokens turn it off.
    """

    fn: Text
    overlong_buffer_tokens: NonNegative = 0
    overlong_penalty: Annotated[float, Field(gt=0)] = 1.0


class RolloutSection(Section):
    """The rollout services. Training samples with the temperature only: no top-p, top-k or penalty.

    `response_tokens` forces response lengths (`lognormal:<sigma>:<median>`), for benchmarks. With
    `prefix_caching` equal prompts share their KV cache within one version; a response then depends, in the
    last digits, on what ran before it.
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


class StalenessSection(Section):
    """The bound on lag, per token, and what happens to a token beyond it.

    `policy`: `mask` trains the rest of its group; `drop` drops the group and issues its prompt again;
    `wait` lets a step wait for groups in flight that it would push over the bound, at most `max_wait_s`.
    """

    max_lag: NonNegative = 4
    policy: Literal["mask", "drop", "wait"] = "mask"
    max_wait_s: Seconds = 30.0
    ready_batches: Count = 1


REDIS_URL_PATTERN = r"^(rediss?://.+|\$\{[A-Za-z_][A-Za-z0-9_]*\})$"


class BufferSection(Section):
    """The experience buffer.

    `journal: redis` wants either `url`, in which `${NAME}` stands for the environment's NAME, or
    `managed: true`, which starts a private server beside the buffer. `fsync` is the journal's own: a
    server behind a `url` has its own setting.
    """

    journal: Literal["none", "file", "redis"] = "file"
    url: Annotated[str | None, Field(pattern=REDIS_URL_PATTERN)] = None
    managed: bool = False
    fsync: Literal["everysec", "always", "never"] = "everysec"
    memory_bytes: Annotated[int, Field(ge=1 << 20)] = 1 << 30
    lease_s: Seconds = 60.0
    max_attempts: Count = 3


class KlSection(Section):
    """KL to the reference policy, in the loss or off the reward. A coefficient of 0 turns it off.

    The adaptive controller moves the coefficient towards `target`, within 1 / `horizon` rows.
    """

    coef: NonNegativeNumber = 0.0
    where: Literal["loss", "reward"] = "loss"
    estimator: Literal[
        "k1", "k2", "k3", "k1+", "k2+", "k3+", "kl", "abs", "mse", "low_var_kl", "low_var_kl+"
    ] = "low_var_kl"
    controller: Literal["fixed", "adaptive"] = "fixed"
    target: Annotated[float, Field(gt=0)] = 0.1
    horizon: Annotated[float, Field(gt=0)] = 10_000.0


class AlgorithmSection(Section):
    """Advantage, loss and off-policy correction.

    `advantage`, `loss` and `correction` are names or `module:function`. `rejection` takes verl's
    `rollout_rs` with its thresholds: `seq_mean_k1` and `0.8_1.25`. `verl_compat` gives verl's numbers
    where ours differ on purpose (docs/algorithms.md).
    """

    advantage: str = "grpo"
    gamma: Share = 1.0
    lam: Share = 1.0
    loss: str = "vanilla"
    clip: tuple[NonNegativeNumber, NonNegativeNumber] = (0.2, 0.28)
    dual_clip: Annotated[float, Field(gt=1)] = 3.0
    value_clip: Annotated[float, Field(gt=0)] = 0.5
    entropy_coeff: NonNegativeNumber = 0.0
    aggregation: Literal[
        "token-mean", "token-sum", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"
    ] = "token-mean"
    prox: Literal["recompute", "loglinear", "behaviour"] = "recompute"
    correction: str = "decoupled_token_is"
    is_threshold: Annotated[float, Field(gt=0)] = 2.0
    normalize_weights: bool = False
    rejection: str = ""
    rejection_threshold: str | float = ""
    veto: Annotated[float, Field(ge=0)] = 1e-4
    kl: KlSection = KlSection()
    drop_constant_groups: bool = True
    verl_compat: bool = False


class CriticSection(Section):
    """The value model of PPO, made when `algorithm.advantage` needs values (`gae`, `vtrace`).

    It starts from `path`, or from the policy's model with a value head of zeros, and shares the
    learner's backend, parallelism and batches. `path` and `revision` are as those of `model`.
    """

    path: Text | None = None
    revision: str | None = None
    lr: Annotated[float, Field(gt=0)] = 1e-5


class LearnerSection(Section):
    """The learner. Three sizes of a batch, from the outside in:

    `groups_per_step`: groups (of `rollout.group_size` rows) that one learner step reserves and trains, after
    which it publishes. It sets how many tokens a version learns from, and what a lag of 1 means.
    `minibatches`: optimizer updates that a step is cut into, by whole groups in ticket order. More of them
    take more, smaller and more off-policy updates from the same data.
    `max_tokens_per_microbatch`: tokens, prompts included, that a rank computes at once. A minibatch's rows
    are packed into as few microbatches of about the same work as this budget allows. It sets memory and
    speed and never the result: gradients add up to those of the whole minibatch.

    Its ranks are tp x pp x cp x dp: matrices, layers (each stage in `vpp` parts), tokens of a row and rows
    are cut. `sequence_parallel` (with tp) and `recompute` save memory; `overlap` sends while computing.
    `backend: fsdp2` runs any Hugging Face model, cut over dp; `compile` puts each of its layers through
    torch.compile. `offload` keeps the optimizer's state in host memory, with fsdp2 the weights too.

    `lr` is reached after `warmup_steps` learner steps of linear rise; `cosine` goes down from it to
    `min_lr_ratio` times `lr` at the end of `steps`. The critic's rate takes the same course.
    """

    backend: Literal["megatron", "fsdp2"] = "megatron"
    tp: Count = 1
    pp: Count = 1
    vpp: Count = 1
    cp: Count = 1
    dp: Count = 1
    sequence_parallel: bool = True
    overlap: bool = False
    recompute: Literal["none", "selective", "full"] = "none"
    gpus: NonNegative = 0
    cpus: Annotated[float, Field(ge=0)] = 1.0
    groups_per_step: Count = 16
    minibatches: Count = 1
    max_tokens_per_microbatch: Count = 16384
    lr: Annotated[float, Field(gt=0)] = 1e-6
    lr_schedule: Literal["constant", "cosine"] = "constant"
    min_lr_ratio: Share = 0.0
    warmup_steps: NonNegative = 0
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    grad_clip: Annotated[float, Field(gt=0)] = 1.0
    offload: bool = False
    compile: bool = False
    steps: Count = 200

    @property
    def num_ranks(self) -> int:
        """Processes of the learner."""
        return self.tp * self.pp * self.cp * self.dp


class WeightSyncSection(Section):
    """How new weights reach the replicas.

    Every `probe_every` steps a version brings the learner's log-probs of a fixed sequence, and a replica
    that has loaded it serves it only if its engine computes the same; 0 turns that off. With `encoding:
    delta` receivers that hold the version before get what has changed, where that is shorter; publisher and
    receivers keep one version more in shared memory for it.
    """

    backend: Literal["auto", "gloo", "nccl"] = "auto"
    parallelism: Count = 1
    deadline_s: Seconds = 60.0
    bucket_bytes: Annotated[int, Field(ge=1 << 10)] = 16 << 20
    probe_every: NonNegative = 10
    encoding: Literal["full", "delta"] = "full"


class EvalSection(Section):
    """Evaluation on held-out prompts, sampled at `temperature`, by a replica pinned to one version."""

    every_steps: NonNegative = 0
    prompts: Count = 512
    temperature: Annotated[float, Field(ge=0)] = 1.0


def check_metric(name: str) -> str:
    """Raise ValueError unless there is a metric of this name: else no checkpoint would be the best."""
    if name not in EVALUATION_METRICS and find(name) is None:
        similar = unknown_names([name]).get(name)
        guess = f"; did you mean {similar}?" if similar else ""
        raise ValueError(f"{' or '.join(EVALUATION_METRICS)}, or a name of docs/metrics.md{guess}")
    return name


class CheckpointSection(Section):
    """Atomic checkpoints of the learner, written while training goes on; the `keep` newest stay.

    The `keep_best` with the highest `best_metric` stay besides, for `asyncrl export`. The metric is one
    of the evaluation (`accuracy`) or of the step. A checkpoint that is due while the one before is
    still being written waits at most `max_stall_s`, then it is skipped (`checkpoint/skipped`).
    """

    every_steps: Count = 20
    keep: Count = 3
    keep_best: NonNegative = 0
    best_metric: Annotated[Text, AfterValidator(check_metric)] = "accuracy"
    max_stall_s: NonNegativeNumber = 30.0


def check_window(steps: tuple[int, int] | None) -> tuple[int, int] | None:
    """Raise ValueError unless `steps` is [a, b] with a < b."""
    if steps is not None and steps[0] >= steps[1]:
        raise ValueError("[a, b] with a < b")
    return steps


class GuardSection(Section):
    """Watches the metrics of every step; `action` answers a severe finding, every finding is explained.

    The limits are starting points: a value beyond one is reported. It is severe if it is also far
    from the run's usual values (`z_score` robust deviations, after `warmup_steps`), or ten times
    beyond. `min_entropy` and `min_throughput` are shares of the run's first values.
    """

    action: Literal["warn", "skip_update", "reduce_lr", "kl_fallback", "rollback", "stop"] = "warn"
    warmup_steps: Annotated[int, Field(ge=3)] = 10
    z_score: Annotated[float, Field(gt=0)] = 8.0
    max_kl: Annotated[float, Field(gt=0)] = 0.03
    max_grad_norm: Annotated[float, Field(gt=0)] = 2.0
    max_clipfrac: Annotated[float, Field(gt=0)] = 0.3
    max_vf_clipfrac: Annotated[float, Field(gt=0)] = 0.05
    min_entropy: Share = 0.05
    min_ess: Share = 0.3
    min_throughput: Share = 0.3


class MetricsSection(Section):
    """Where metrics go besides `metrics.jsonl`, and what is measured.

    `profile_steps: [a, b]` records learner steps a to b - 1, counted from 0, with torch.profiler, into
    `runs/<name>/profile/`. `peak_tflops` is what `perf/mfu/*` divides by, per learner rank; null takes
    the data sheet's figure of a known GPU and measures any other device.
    """

    tensorboard: bool = True
    profile_steps: Annotated[tuple[NonNegative, Count] | None, AfterValidator(check_window)] = None
    peak_tflops: Annotated[float, Field(gt=0)] | None = None


def check_host(host: str | None) -> str | None:
    """Raise ValueError unless `host` is an IPv4 address that others can connect to."""
    if host is None:
        return None
    address = IPv4Address(host)
    if address.is_unspecified or address.is_multicast:
        raise ValueError("the address of one interface, which other services can connect to")
    return host


class LauncherSection(Section):
    """`ray: local` starts Ray on this machine. `api_port: 0` takes a free port for the control API.

    `host` is the IPv4 address of the interface that services listen on; null keeps their sockets in a
    folder that only this user can open. With `curve` their connections are encrypted, and only holders
    of a key that was made for this start get in; `auto`: when the host is not loopback.
    """

    ray: Literal["local"] = "local"
    host: Annotated[str | None, AfterValidator(check_host)] = None
    curve: Literal["auto", "on", "off"] = "auto"
    api_port: Annotated[int, Field(ge=0, le=65535)] = 0
    start_deadline_s: Seconds = 300.0

    @property
    def is_local(self) -> bool:
        """Whether nobody on another machine can reach the services' sockets."""
        return self.host is None or IPv4Address(self.host).is_loopback

    @property
    def has_curve(self) -> bool:
        """Whether the services' sockets have keys."""
        return self.curve == "on" or (self.curve == "auto" and not self.is_local)


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
    critic: CriticSection = CriticSection()
    learner: LearnerSection = LearnerSection()
    weight_sync: WeightSyncSection = WeightSyncSection()
    eval: EvalSection = EvalSection()
    checkpoint: CheckpointSection = CheckpointSection()
    guard: GuardSection = GuardSection()
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
