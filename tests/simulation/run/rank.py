"""A played rank of the learner: performs the leader's orders with weights that are a node of a tree.

Invariant: what it trains is told to the judge before the leader books it, and a checkpoint holds its node.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

from asyncrl.core import staleness as versions
from asyncrl.core.experience import Group
from asyncrl.core.staleness import PolicyVersion
from learner.batch_fetcher import BatchFetcher, FittingGroups
from learner.checkpoint import CheckpointStore
from learner.checkpoint.snapshot import Snapshot
from learner.checkpoint.store import digest_file
from learner.checkpoint.writer import BackgroundWriter
from learner.leader.leader import Leader
from learner.orders import Adjust, Checkpoint, Finish, Order, Publish, Restore, StepOutcome, Train
from tests.simulation.accounts.truth import ROOT
from tests.simulation.kernel.runtime import SimRuntime
from tests.simulation.run.judge import RunJudge
from tests.simulation.run.scenario import Scenario

STATE_FILE = "rank-00000.json"
WRITE_S = 0.1


@dataclass(frozen=True)
class NodeSnapshot:
    """A node, as a checkpoint holds it."""

    runtime: SimRuntime
    node: int

    def write(self, folder: Path) -> dict[str, str]:
        """Write it, in virtual time; return the digest of its file."""
        self.runtime.sleep(WRITE_S * self.runtime.world.dice.random())
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / STATE_FILE
        file.write_text(json.dumps({"node": self.node}))
        return {file.name: digest_file(file)}


class PlayedRank:
    """See the module. `node`: the weights that it has."""

    def __init__(
        self,
        runtime: SimRuntime,
        scenario: Scenario,
        leader: Leader,
        fetcher: BatchFetcher,
        store: CheckpointStore,
        judge: RunJudge,
    ) -> None:
        self._runtime, self._scenario, self._leader = runtime, scenario, leader
        self._source, self._store, self._judge = FittingGroups(fetcher, scenario.longest_row), store, judge
        self._writer = BackgroundWriter(0, runtime=runtime)
        self.node = ROOT
        self._groups: list[Group] = []
        self._steps: dict[int, int] = {}
        self._branch: tuple[float, bool] = (1.0, False)
        self.is_complete = False

    def perform(self, order: Order) -> None:
        """Do what the leader orders."""
        match order:
            case Restore():
                self._restore(order)
            case Train():
                self._train(order)
            case Adjust():
                self._branch = (order.lr_scale, order.is_kl_off)
            case Publish():
                self._publish(order)
            case Checkpoint():
                snapshot: object = NodeSnapshot(self._runtime, self.node)
                self._writer.begin(self._store.temporary(order.step), {"": lambda: _as_snapshot(snapshot)})
            case Finish():
                self.is_complete = order.is_complete
            case _:
                pass

    def _restore(self, order: Restore) -> None:
        self.node, self._groups, self._steps, self._branch = ROOT, [], {}, (1.0, False)
        if order.has_checkpoint:
            self.node = json.loads((self._store.folder(order.step) / STATE_FILE).read_text())["node"]
        self._judge.hear_restore(self._runtime.process, self._leader.token, order.step, self.node)

    def _train(self, order: Train) -> None:
        if order.is_first:
            self._groups, self._steps = [], {}
        self._groups += self._source.fetch(order.token, order.tickets)
        self._steps |= dict(order.versions)
        if not order.is_last:
            return
        self._runtime.sleep(self._scenario.step_s)
        step, max_lag, steps = order.step, self._scenario.max_lag, self._steps
        is_masked = {
            number: versions.is_over_age(step, counted, max_lag) for number, counted in steps.items()
        }
        groups = sorted(self._groups, key=lambda group: group.ticket)
        self.node = self._judge.hear_trained(step, self.node, groups, is_masked, self._branch)
        stale, lags = [], [0]
        for group in groups:
            used = {span.version for one in group.trajectories for span in one.spans}
            of_group = [versions.lag(step, steps[number]) for number in used if not is_masked[number]]
            lags += of_group
            stale += [] if of_group else [group.ticket]
        tickets = [group.ticket for group in groups if group.ticket not in stale]
        # At some steps, once in a run, the figures that the guard looks at are not finite.
        is_bad = step in self._scenario.rollbacks and self._judge.is_first_of(step)
        refused = tickets[:1] if is_bad and not self._scenario.is_forking else []
        self._leader.outcome = StepOutcome(stale, self._source.take_left_out(), refused, max(lags))
        self._leader.judge(step, {"actor/grad_norm": math.nan if is_bad else 1.0}, len(refused))

    def _publish(self, order: Publish) -> None:
        version, token = PolicyVersion(order.number, order.step), self._leader.token
        tensors = self._judge.make_weights(order.number, token, self.node)
        self._judge.begin_publish(self._runtime.process, token, order.number)
        if self._leader.publishing.client.publish(version, tensors):
            self._judge.hear_publish(self._runtime.process, token, order.number)


def _as_snapshot(snapshot: object) -> Snapshot:
    return snapshot  # type: ignore[return-value]
