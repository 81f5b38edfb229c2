"""GPUs of a service: whole ones, or a share of one that it has beside others (pure).

A share of a GPU is the same share of its memory, less what CUDA's contexts and graphs take outside the
allocators: `memory_share` is the limit of the learner's allocator and of the engine alike.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

from asyncrl.core.config.sections.section import refuse

USABLE = 0.92
"""As vLLM's own default of a GPU that it has to itself."""


def check_gpus(gpus: float) -> float:
    """Raise unless these are whole GPUs, or a share of one."""
    if gpus > 1 and not gpus.is_integer():
        raise refuse("a whole number of GPUs, or a share of one between 0 and 1", "For example 0.5")
    return gpus


Gpus = Annotated[float, Field(ge=0), AfterValidator(check_gpus)]


def memory_share(gpus: float) -> float | None:
    """Return the share of a GPU's memory that a service may take; None if it has its GPUs to itself."""
    return USABLE * gpus if 0 < gpus < 1 else None
