"""Sessions of a real run, for `placement`: sources, turns and lengths, from its journal.

    python -m benchmarks.rollout.recorded runs/NAME

writes them beside this file. Owns its form. Lengths alone are kept, no token.
"""

from __future__ import annotations

import functools
import json
import sys
from collections import defaultdict
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any

from asyncrl.buffer.ledger.events import Issued, Leased
from asyncrl.cli.audit.report import opened_past
from asyncrl.core.experience import Trajectory, decode_group
from rollout_service.gateway.conversation.transcript import common_prompt

RECORDED = Path(__file__).parent / "traces/recorded_sessions.json"
MAX_BYTES = 64 << 10
Turns = list[tuple[float, float]]
"""Of a session: tokens of each answer, and of the observation after it."""


@dataclass(frozen=True)
class Source:
    """Prompts of one source, which all begin with `shared_tokens`; `groups` of sessions."""

    shared_tokens: int
    own_tokens: int
    groups: list[list[Turns]]


@functools.cache
def recorded() -> list[Source]:
    """Return the sources of the recorded run."""
    return [Source(**one) for one in json.loads(RECORDED.read_text())["sources"]]


def record(folder: Path) -> dict[str, Any]:
    """Return sources, turns and lengths of the groups that a run has trained, from its journal.

    Raises:
        ConfigError: It keeps no journal.
    """
    prompts: dict[int, list[list[int]]] = defaultdict(list)
    groups: dict[int, list[list[Turns]]] = defaultdict(list)
    with opened_past(folder) as past:
        events = [one.event for one in past.events()]
        sources = {one.ticket: one.source for one in events if isinstance(one, Issued)}
        leased = {one.ticket: 1 for one in events if isinstance(one, Leased)}
        found = past.scan.find_payloads([(ticket, 1) for ticket in leased])
    for (ticket, _), payload in sorted(found.items()):
        group = decode_group(payload)
        prompts[sources[ticket]].append(group.prompt_ids.tolist())
        groups[sources[ticket]].append([_turns_of(one) for one in group.trajectories])
    told = []
    for number in sorted(groups):
        shared = common_prompt(prompts[number])
        own = round(median(len(one) - shared for one in prompts[number]))
        told.append({"shared_tokens": shared, "own_tokens": own, "groups": groups[number]})
    return {"run": folder.name, "sources": told}


def _turns_of(trajectory: Trajectory) -> Turns:
    """Return the lengths of a trajectory's answers, each with that of the observation after it."""
    lengths = [len(list(same)) for _, same in groupby(trajectory.loss_mask.tolist())]
    return list(zip(lengths[::2], [*lengths[1::2], 0], strict=False))


def main(run: str) -> int:
    """Record a run by its folder; as many of its groups as `MAX_BYTES` hold. Returns the exit code."""
    found = record(Path(run))
    while len(text := json.dumps(found, separators=(",", ":"))) > MAX_BYTES:
        for source in found["sources"]:
            source["groups"] = source["groups"][: len(source["groups"]) * 3 // 4]
    RECORDED.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
