"""`learner.backend: megatron`, and the layouts of experts that it cannot train.

Imports neither torch nor Megatron-core: `plan` reads it.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from asyncrl.core.config.tree import LearnerSection
from asyncrl.core.variants import BackendFacts
from asyncrl.models.architectures import Experts

if TYPE_CHECKING:
    from learner.backend import LearnerBackend, ValueBackend
    from learner.megatron.backend import MegatronBackend, MegatronValueBackend

    _checked: tuple[type[LearnerBackend], type[ValueBackend]] = MegatronBackend, MegatronValueBackend

VARIANT = BackendFacts(
    "learner.megatron.backend:MegatronBackend",
    "learner.megatron.backend:MegatronValueBackend",
    lacks=("compile",),
    # Kernels of communication and computation start in the order of their calls, which overlap relies on.
    gpu_environment={"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
    unfit_experts="learner.megatron.variant:find_unfit_experts",
)


def find_unfit_experts(learner: LearnerSection, experts: Experts | None) -> Iterator[tuple[str, str]]:
    """Yield (problem, hint) for each way in which the learner's ranks cannot share the model's experts."""
    tp, ep, etp = learner.tp, learner.ep, learner.expert_tp
    if experts is None:
        if ep > 1 or learner.etp is not None:
            yield "learner.ep and learner.etp cut experts, and the model has none", "Leave them out"
        return
    for what, size, key, num_parts in (
        ("the model's experts", experts.num, "ep", ep),
        ("the channels of an expert", experts.size, "etp", etp),
        ("tp x cp x dp, the ranks of a stage", tp * learner.cp * learner.dp, "ep x etp", ep * etp),
    ):
        if size % num_parts:
            yield (
                f"learner.{key}: {num_parts} does not divide {what}: {size}",
                f"Choose a {key} that divides it",
            )
    if ep == 1 and etp != tp:
        problem = (
            f"learner.etp: {etp} with ep: 1 and tp: {tp} would train wrongly without any sign of it: "
            "Megatron-core sums the gradients of such experts over other ranks than those that hold them"
        )
        yield problem, "Leave out etp, or raise ep"
    if ep > 1 and etp > 1 and not learner.gpus:
        yield (
            f"learner.etp: {etp} with ep: {ep} needs GPUs: gloo gathers parts of equal size alone",
            "Leave out etp",
        )
    if tp > 1 and not learner.sequence_parallel:
        yield "learner.tp with experts needs learner.sequence_parallel", "Leave it out: it is on"
    if learner.kernels == "te":
        yield (
            "learner.kernels is te, which has no layers with experts here",
            "Set learner.kernels: torch, or leave it out",
        )
