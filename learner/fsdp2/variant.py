"""`learner.backend: fsdp2`. Imports no torch: `plan` reads it."""

from typing import TYPE_CHECKING

from asyncrl.core.variants import BackendFacts

if TYPE_CHECKING:
    from learner.backend import LearnerBackend, ValueBackend
    from learner.fsdp2.backend import Fsdp2Backend, Fsdp2ValueBackend

    _checked: tuple[type[LearnerBackend], type[ValueBackend]] = Fsdp2Backend, Fsdp2ValueBackend

VARIANT = BackendFacts(
    "learner.fsdp2.backend:Fsdp2Backend",
    "learner.fsdp2.backend:Fsdp2ValueBackend",
    takes_any_model=True,
    shards_weights=True,
    lacks=("tp", "pp", "vpp", "cp", "ep", "etp", "overlap", "recompute: selective", "kernels: te"),
    hint="fsdp2 cuts the model over learner.dp alone, overlaps by itself, and recomputes in full or "
    "not at all",
)
