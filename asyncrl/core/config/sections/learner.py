"""The learner and its models: the policy and the critic."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from asyncrl.core.config.gpus import Gpus
from asyncrl.core.config.sections.section import Count, Decay, NonNegative, Section, Text, refuse
from asyncrl.core.variants import BackendName


class LoraSection(Section):
    """Low-rank adapters (LoRA, arXiv 2106.09685): the model's matrices stay, their adapters are trained.

    Of each matrix W of a target, W + (alpha / rank) B A is computed. Versions, checkpoints and the optimizer
    hold A and B alone; engines merge them into the model's weights as they load a version.
    """

    rank: NonNegative = 0
    """[rows] Of each A; 0 trains all weights."""
    alpha: Annotated[float, Field(gt=0)] = 16.0
    """[1] Numerator of the adapters' scale alpha / rank."""
    targets: Annotated[tuple[Text, ...], Field(min_length=1)] = (
        *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    )
    """Names of the matrices that have adapters, as in the model's files."""
    path: Text | None = None
    """PEFT adapter to start from, of the same rank, alpha and targets. For example: adapters/mine"""

    @property
    def scale(self) -> float:
        """Factor of B A."""
        return self.alpha / self.rank


class ModelSection(Section):
    """The policy: a Hugging Face folder, a hub id, or `builtin:digit_sort`.

    A hub id is fetched once and pinned to the commit that was found; `owner/name@revision` names a branch,
    a tag or a commit. A path that is a folder here is that folder.

    `dtype` is that of the computation; the optimizer keeps float32. `float16` is for GPUs without
    bfloat16: losses are scaled, and an update whose gradient overflows is computed again.
    """

    path: Text
    """The policy's initial weights. For example: Qwen/Qwen3-0.6B, "builtin:digit_sort", models/mine"""
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Data type of computation and of published weights."""
    lora: LoraSection = LoraSection()


class CriticSection(Section):
    """The value model of PPO, made when `algorithm.advantage` needs values (`gae`, `vtrace`).

    It starts from `path`, or from the policy's model with a value head of zeros, and shares the
    learner's backend, parallelism and batches. `path` is as that of `model`.
    """

    path: Text | None = None
    """The critic's initial weights; null takes the policy's model. For example: Qwen/Qwen3-0.6B"""
    lr: Annotated[float, Field(gt=0, le=1)] = 1e-5
    """[1] Learning rate of the critic, reached after `learner.warmup_steps`."""


PLAIN_SCHEDULES = {"constant": 1.0, "cosine": 0.0}
"""Courses of the learning rate without a number, and what each leaves of it at its end."""
RATIO = re.compile(r"\d*\.?\d+(e-?\d+)?")


def read_ratio(schedule: str) -> float:
    """Return what a schedule leaves of the learning rate at its end, as a share.

    Raises:
        ValueError: It is no schedule.
    """
    if schedule in PLAIN_SCHEDULES:
        return PLAIN_SCHEDULES[schedule]
    kind, _, ratio = schedule.partition(":")
    if kind == "cosine" and RATIO.fullmatch(ratio) and float(ratio) <= 1:
        return float(ratio)
    raise refuse(
        "constant, cosine, or cosine:<ratio from 0 to 1>", "cosine:0.1 ends at a tenth of learner.lr"
    )


def check_schedule(schedule: str) -> str:
    """Raise ValueError unless `schedule` is a course of the learning rate."""
    read_ratio(schedule)
    return schedule


DETERMINISTIC = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NCCL_ALGO": "Ring",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
}
"""Environment of a rank on a GPU under `learner.deterministic`: of cuBLAS, NCCL and TransformerEngine."""


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
    are cut; `ep` of a stage's ranks share the experts of a mixture.
    `sequence_parallel` (with tp) and `recompute` save memory; `overlap` sends while computing.
    `backend: fsdp2` runs any Hugging Face model, cut over dp; `compile` puts each of its layers through
    torch.compile. `offload` keeps AdamW on the host, where it has `cpus` cores; with fsdp2 the weights too.

    With `stream` a step begins with the groups that are complete and takes the others as they come, while
    replicas still work on them; the update comes when all are there, and its gradients are those of the
    whole batch. Refused with what needs the batch before its first token is trained (docs/algorithms.md).

    `lr` is reached after `warmup_steps` learner steps of linear rise; `lr_schedule: cosine:0.1` goes down
    from it to a tenth of it at the end of `steps`, `cosine` to 0. The critic's rate takes the same course.
    """

    backend: BackendName = "megatron"
    """Training backend: Megatron-core, or PyTorch's FSDP2 for any Hugging Face model."""
    tp: Count = 1
    """[ranks] Tensor parallelism: ranks that share each matrix."""
    pp: Count = 1
    """[ranks] Pipeline parallelism: stages of layers."""
    vpp: Count = 1
    """[parts] Virtual pipeline parallelism: parts of layers on each pipeline rank."""
    cp: Count = 1
    """[ranks] Context parallelism: ranks that share the tokens of a row."""
    dp: Count = 1
    """[ranks] Data parallelism: ranks that share the rows of a minibatch."""
    ep: Count = 1
    """[ranks] Expert parallelism: ranks that share the experts of a layer, out of tp x cp x dp."""
    etp: Count | None = None
    """[ranks] Tensor parallelism of experts; null takes tp where ep is 1, and 1 otherwise."""
    sequence_parallel: bool = True
    """Whether tp ranks also share the activations between matrices."""
    overlap: bool = False
    """Whether communication of gradients and weights overlaps with computation."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations that are recomputed instead of stored."""
    gpus: Gpus = 0.0
    """[GPUs] GPUs of each rank: 1, a share of one for a lone rank, or 0 to train on CPU."""
    cpus: Annotated[float, Field(ge=0)] = 1.0
    """[cores] CPU cores that Ray reserves for each rank."""
    groups_per_step: Count = 16
    """[groups] Groups that one learner step trains."""
    minibatches: Count = 1
    """[updates] Optimizer updates of a step."""
    max_tokens_per_microbatch: Count = 16384
    """[tokens] Tokens that a rank computes at once; affects memory and speed, never the result."""
    shared_prompt: Literal["auto", "off"] = "auto"
    """Whether tokens that rows of a group begin with are computed once; auto: where that is exact."""
    stream: bool = False
    """Whether a step computes on groups as they finish instead of the whole batch."""
    lr: Annotated[float, Field(gt=0, le=1)] = 1e-6
    """[1] Highest learning rate of the policy."""
    lr_schedule: Annotated[str, AfterValidator(check_schedule)] = "constant"
    """Schedule of the learning rate after the warm-up. For example: constant, "cosine:0.1", cosine"""
    warmup_steps: NonNegative = 0
    """[steps] Steps over which the learning rate rises to `lr`."""
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    """[1] AdamW's decay of the gradient's mean and square."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """[1] AdamW's weight decay, per update and unit of learning rate."""
    router_aux_loss: Annotated[float, Field(ge=0)] = 0.0
    """[1] Coefficient of the loss that balances a mixture's experts in each row."""
    router_z_loss: Annotated[float, Field(ge=0)] = 0.0
    """[1] Coefficient of the loss that keeps the logits of a mixture's routers small."""
    grad_clip: Annotated[float, Field(gt=0)] = 1.0
    """[1] Largest norm of the gradient; larger ones are scaled down."""
    offload: bool = False
    """Whether a GPU learner's AdamW and its state are on the host; with fsdp2 the weights too."""
    compile: bool = False
    """Whether each layer is compiled with torch.compile; fsdp2 only."""
    kernels: Literal["auto", "torch", "te"] = "auto"
    """Kernels of layers: torch's, or TransformerEngine's (te, GPUs only); auto takes torch's."""
    deterministic: bool = False
    """Whether a GPU repeats a step bit for bit, by slower kernels; a CPU always does."""
    steps: Count = 200
    """[steps] Number of steps of the run."""

    @property
    def min_lr_ratio(self) -> float:
        """Share of `lr` that is left at the end of `steps`."""
        return read_ratio(self.lr_schedule)

    @property
    def expert_tp(self) -> int:
        """Ranks that share the matrices of an expert."""
        return self.etp or (self.tp if self.ep == 1 else 1)

    @property
    def num_ranks(self) -> int:
        """Processes of the learner."""
        return self.tp * self.pp * self.cp * self.dp
