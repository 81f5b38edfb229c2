"""Launch specification of one service (pure)."""

from __future__ import annotations

from dataclasses import dataclass, field

from asyncrl.core.service import ServiceContext

RUN_VARIABLE = "ASYNCRL_RUN_ID"
"""Marks every process of a run, so that what is left over can be found and ended by pid."""
NODE_VARIABLE = "ASYNCRL_NODE"
"""Tells a service's process of which node of a cluster it is."""


@dataclass(frozen=True)
class ServiceSpec:
    """Launch specification of one service.

    Attributes:
        factory: `module:function` of its composition root.
        context: What it gets to know.
        log_path: Its log file.
        cpus: CPU share that Ray reserves.
        gpus: GPUs that Ray reserves.
        environment: Set before the process imports anything.
        node: Ray's id of the node that it must run on; empty leaves that to Ray.
    """

    factory: str
    context: ServiceContext
    log_path: str
    cpus: float = 0.0
    gpus: float = 0.0
    environment: dict[str, str] = field(default_factory=dict)
    node: str = ""

    @property
    def name(self) -> str:
        return self.context.name
