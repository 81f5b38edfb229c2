"""Mutants of guards that others cover in every scenario, or against what a connection of the simulator never
does: each fails a unit test, in which the guard stands alone.

`UNIT_TESTS` names that test by the mutant's name. `python -m tests.simulation.unit_mutants NAME` runs it
without the guard; its exit status is pytest's, 1 if the test fails.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import pytest

from asyncrl.buffer.client import LearnerClient
from asyncrl.buffer.learner_ops import LearnerOps
from asyncrl.buffer.ledger.ledger import Ledger
from tests.simulation.mutation import Mutant, Patch, always, mutated
from weight_sync.coordination.order_queue import ReportLog
from weight_sync.protocol.copies.slots import Copies
from weight_sync.receiving.replica_session import ReplicaSession
from weight_sync.transfer_executor import TransferExecutor

UNIT = "unit"


def _take_any(self: Copies[Any], serving: int) -> Any:
    if self._taken is None:
        self._taken, self._committed = self._committed, None
    return self._taken


def _repeat_nothing(self: LearnerClient, call: Any) -> Any:
    return call(self._deadline_s)


def _believe_pins(self: ReplicaSession, asked: Any, line: str) -> bool:
    return line != "pins" and _IS_LATE(self, asked, line)


_IS_LATE = ReplicaSession._is_late


def _mutant(name: str, guard: str, *patches: tuple[Any, str, Any]) -> Mutant:
    return Mutant(name, guard, UNIT, tuple(Patch(*one) for one in patches))


UNIT_MUTANTS = (
    _mutant("taken_twice", "an engine is handed only what is newer", (Copies, "take", _take_any)),
    _mutant(
        "untaken",
        "a copy whose engine is gone is given to the next one",
        (Copies, "release_copies", always(None)),
    ),
    _mutant(
        "late_calls",
        "a replica's call that comes late is not believed",
        (ReplicaSession, "_is_late", always(False)),
    ),
    _mutant(
        "late_pins",
        "a pin that comes behind its unpin does not count",
        (ReplicaSession, "_is_late", _believe_pins),
    ),
    _mutant(
        "hellos_numbered",
        "a hello or a report that comes late changes nothing",
        (ReportLog, "is_new", always(True)),
        (ReportLog, "newest", always(0)),
    ),
    _mutant(
        "broken_groups", "a group that broke is not used again", (TransferExecutor, "abort", always(None))
    ),
    _mutant(
        "leases_expire",
        "leases expire",
        (Ledger, "expire", always(0)),
        (Ledger, "next_expiry", property(always(math.inf))),
    ),
    _mutant(
        "learner_repeats",
        "a learner's call that was lost with its connection is made again",
        (LearnerClient, "_repeat", _repeat_nothing),
    ),
    _mutant(
        "late_learner_calls",
        "a call behind a later one of its learner is refused",
        (LearnerOps, "_check_turn", always(None)),
    ),
)
UNIT_TESTS = {
    "taken_twice": "tests/weight_sync/copies/test_slots.py::test_what_the_engine_serves_already_makes_room",
    "untaken": "tests/weight_sync/copies/test_slots.py"
    "::test_what_is_given_up_makes_room_where_a_newer_one_is_here",
    "late_calls": "tests/weight_sync/protocol/test_late_calls.py"
    "::test_a_load_that_is_told_behind_a_later_one_is_not_believed",
    "late_pins": "tests/weight_sync/protocol/test_late_calls.py::test_a_pin_behind_its_unpin_holds_nothing",
    "hellos_numbered": "tests/weight_sync/protocol/test_protocol_peer.py"
    "::test_a_report_that_is_repeated_is_taken_once",
    "broken_groups": "tests/weight_sync/backends/test_transports.py"
    "::test_closing_a_carrier_wakes_its_running_transfers",
    "leases_expire": "tests/buffer/ledger/test_ledger.py"
    "::test_an_expired_lease_goes_back_as_the_next_attempt_at_the_same_prompt",
    "learner_repeats": "tests/buffer/service/test_restarted.py"
    "::test_what_a_learner_asked_of_a_buffer_that_died_is_answered_by_its_successor",
    "late_learner_calls": "tests/buffer/clients/test_client.py"
    "::test_a_call_that_was_made_again_changes_nothing_if_it_comes_late",
}


def main(name: str) -> int:
    """Run a mutant's unit test without its guard; return pytest's exit status."""
    mutant = next(one for one in UNIT_MUTANTS if one.name == name)
    options = ["-n", "0", "-q", "--tb=line", "-p", "no:cacheprovider", "-m", "long or not long"]
    with mutated(mutant):
        return int(pytest.main([UNIT_TESTS[name], *options]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
