"""Patience of the fleet machine with the services of a configured run (pure)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncrl.control.fleet.machine import FleetRules
from asyncrl.core.variants import journal_facts

if TYPE_CHECKING:
    from asyncrl.core.config.tree import Config


def make_rules(config: Config, num_ranks: int, num_publishers: int = 1) -> FleetRules:
    """Return how patient a run is with its services."""
    never_again = {}
    journal = config.buffer.journal
    if not journal_facts(journal).keeps_past:
        never_again["buffer"] = f"with buffer.journal: {journal} its contents are lost"
    return FleetRules(
        num_ranks=num_ranks,
        num_publishers=num_publishers,
        max_restarts=config.launcher.max_restarts,
        start_deadline_s=config.launcher.start_deadline_s,
        never_again=never_again,
    )
