"""`learner.backend: megatron`. Imports neither torch nor Megatron-core: `plan` reads it."""

from typing import TYPE_CHECKING

from asyncrl.core.variants import BackendFacts

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
)
