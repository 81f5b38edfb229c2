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
)
