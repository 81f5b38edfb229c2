"""The scopes of the simulator: the services that play together, their faults, and the mutants of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tests.simulation.mutation import Mutant
from tests.simulation.outcome import Outcome
from tests.simulation.run.mutants import MUTANTS as RUN_MUTANTS
from tests.simulation.run.play import play as play_run
from tests.simulation.run.scenario import CLASSES as RUN_CLASSES
from tests.simulation.run.scenario import draw_scenario as draw_run
from tests.simulation.supervision.mutants import MUTANTS as SUPERVISION_MUTANTS
from tests.simulation.supervision.play import play as play_supervision
from tests.simulation.supervision.scenario import CLASSES as SUPERVISION_CLASSES
from tests.simulation.supervision.scenario import draw_scenario as draw_supervision
from tests.simulation.sync.mutants import MUTANTS as SYNC_MUTANTS
from tests.simulation.sync.play import play as play_sync
from tests.simulation.sync.scenario import CLASSES as SYNC_CLASSES
from tests.simulation.sync.scenario import draw_scenario as draw_sync

GENERAL = "general"
RPC_FILES = (
    "asyncrl/core/rpc/client.py",
    "asyncrl/core/rpc/operations.py",
    "asyncrl/core/rpc/request.py",
    "asyncrl/core/rpc/server.py",
)
SYNC_FILES = (
    *RPC_FILES,
    "weight_sync/transfer_executor.py",
    "weight_sync/coordination/order_queue.py",
    "weight_sync/coordination/coordinator.py",
    "weight_sync/encoding/delta_codec.py",
    "weight_sync/publisher_client.py",
    "weight_sync/coordinator_session.py",
    "weight_sync/link.py",
    "weight_sync/memory/publisher_state.py",
    "weight_sync/memory/pool.py",
    "weight_sync/memory/segments.py",
    "weight_sync/memory/staging_area.py",
    "weight_sync/memory/staging.py",
    "weight_sync/protocol/copies/sharing.py",
    "weight_sync/protocol/lanes/starts.py",
    "weight_sync/protocol/lanes/transfers.py",
    "weight_sync/protocol/round_manager.py",
    "weight_sync/protocol/round_reports.py",
    "weight_sync/protocol/state.py",
    "weight_sync/protocol/failure_attribution.py",
    "weight_sync/protocol/members.py",
    "weight_sync/protocol/peer.py",
    "weight_sync/protocol/swap_scheduler.py",
    "weight_sync/protocol/protocol.py",
    "weight_sync/protocol/rounds.py",
    "weight_sync/publisher.py",
    "weight_sync/receiving/inbound_rounds.py",
    "weight_sync/receiving/receiver.py",
    "weight_sync/receiving/replica_session.py",
)

RUN_FILES = (
    *RPC_FILES,
    "asyncrl/buffer/client.py",
    "asyncrl/buffer/learner_ops.py",
    "asyncrl/buffer/ledger/census.py",
    "asyncrl/buffer/ledger/evaluations.py",
    "asyncrl/buffer/ledger/facts.py",
    "asyncrl/buffer/ledger/commands/leases.py",
    "asyncrl/buffer/ledger/commands/results.py",
    "asyncrl/buffer/ledger/ledger.py",
    "asyncrl/buffer/ledger/snapshot.py",
    "asyncrl/buffer/ledger/state.py",
    "asyncrl/buffer/pending_requests.py",
    "asyncrl/buffer/client.py",
    "asyncrl/buffer/replica_ops.py",
    "asyncrl/buffer/service.py",
    "asyncrl/buffer/store.py",
    "learner/checkpoint/store.py",
    "learner/checkpoint/writer.py",
    "learner/batch_fetcher.py",
    "learner/leader/batches.py",
    "learner/leader/checkpoints.py",
    "learner/leader/leader.py",
    "learner/leader/publishing.py",
    "rollout_service/sampling/partial_rollout.py",
    "rollout_service/engine/metered.py",
    "rollout_service/sampling/episode.py",
    "rollout_service/evaluation/evaluator.py",
    "rollout_service/sampling/groups.py",
    "rollout_service/replica/groups.py",
    "rollout_service/replica/leases.py",
    "rollout_service/replica/lifecycle.py",
    "rollout_service/replica/service.py",
    "rollout_service/replica/weights.py",
    "weight_sync/link.py",
)

SUPERVISION_FILES = (
    "asyncrl/control/fleet/budget.py",
    "asyncrl/control/fleet/machine.py",
    "asyncrl/control/fleet/saved.py",
    "asyncrl/control/fleet/units.py",
    "asyncrl/control/operations.py",
    "asyncrl/control/rows/collector.py",
    "asyncrl/control/rows/recorder.py",
    "asyncrl/control/rows/row_fetcher.py",
    "asyncrl/control/supervisor.py",
    "asyncrl/control/reconciler/actuator.py",
    "asyncrl/control/reconciler/reconciler.py",
    "asyncrl/control/reconciler/report.py",
    "asyncrl/control/reconciler/status_events.py",
)


@dataclass(frozen=True)
class Scope:
    """See the module.

    Attributes:
        play: Plays a seed of a class, and keeps the lines of its trace where that is asked for.
        describe: Returns a seed's scenario in lines.
        files: Production modules whose statements are counted.
    """

    name: str
    play: Callable[[int, str, bool], Outcome]
    describe: Callable[[int, str], list[str]]
    classes: tuple[str, ...]
    mutants: Sequence[Mutant]
    files: tuple[str, ...]

    def faults_of(self, seed: int) -> str:
        """Return the class of a seed where none is asked for: every other one general, the rest in turn."""
        aimed = [name for name in self.classes if name != GENERAL]
        return aimed[seed // 2 % len(aimed)] if seed % 2 else GENERAL

    def mutant(self, name: str) -> Mutant:
        """Return the mutant of a name."""
        return next(one for one in self.mutants if one.name == name)


SCOPES = {
    "sync": Scope(
        "sync",
        play_sync,
        lambda seed, faults: draw_sync(seed, faults).describe(),
        tuple(SYNC_CLASSES),
        SYNC_MUTANTS,
        SYNC_FILES,
    ),
    "run": Scope(
        "run",
        play_run,
        lambda seed, faults: draw_run(seed, faults).describe(),
        tuple(RUN_CLASSES),
        RUN_MUTANTS,
        RUN_FILES,
    ),
    "supervision": Scope(
        "supervision",
        play_supervision,
        lambda seed, faults: draw_supervision(seed, faults).describe(),
        tuple(SUPERVISION_CLASSES),
        SUPERVISION_MUTANTS,
        SUPERVISION_FILES,
    ),
}
