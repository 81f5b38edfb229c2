"""Promises of a whole run, checked from outside; those of weight sync are checked as well.

Owns a tree of weights by content, and the account of the journal, recounted from its turns. Weights are a
node of the tree, and a version number stands for one node.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

import torch

from asyncrl.buffer.journals.journal import unpack_commit
from asyncrl.buffer.ledger.census import take_census
from asyncrl.buffer.ledger.orders import PromptOrder, Source
from asyncrl.buffer.ledger.state import LedgerState
from asyncrl.cli.audit.recount import Recount as AuditRecount
from asyncrl.core.experience import Group
from tests.simulation.accounts.recount import Recount
from tests.simulation.accounts.truth import ROOT, WeightsTree
from tests.simulation.accounts.violation import Violation
from tests.simulation.kernel.network import Wires
from tests.simulation.kernel.world import Process, World
from tests.simulation.parts.journal import Disk
from tests.simulation.run.data import NUM_PROMPTS
from tests.simulation.run.scenario import Scenario
from tests.simulation.sync.content import Truth
from tests.simulation.sync.judge import Judge


class RunJudge(Judge):
    """See the module.

    Attributes:
        node_of: What a version number was registered for.
        last_node: The weights that a learner ended with, 0 until one does.
        newest_token: The newest one that a learner was given.
        acknowledged: (ticket, attempt) of groups that a replica was told are stored.
    """

    def __init__(self, world: World, wires: Wires, truth: Truth, scenario: Scenario, disk: Disk) -> None:
        super().__init__(world, wires, truth)
        self._max_lag, self._disk = scenario.max_lag, disk
        self._prompt_at = PromptOrder(scenario.seed, (Source(NUM_PROMPTS),), True).at
        self.tree = WeightsTree()
        self.node_of: dict[int, int] = {}
        self.last_node = self.newest_token = 0
        self.acknowledged: set[tuple[int, int]] = set()
        self.num_steps = self.num_masked = self.lag_max = 0
        self._reached: set[int] = set()
        self._answers: dict[tuple[int, int], list[frozenset[int]]] = {}
        self._recount = Recount(self._prompt_at)
        self._num_read = self._num_cut = self._num_judged = 0
        self._is_contradicted = False

    # --- learners ---------------------------------------------------------------------------------

    def hear_restore(self, process: Process, token: int, step: int, node: int) -> None:
        """A learner has taken up the weights of a step."""
        self.truth.token = max(self.truth.token, token)
        self.hear_open(process, token)
        self.world.note(f"restored {process} step {step} node {node}")
        if self.tree[node].step != step:
            self.say(f"S6: {process} resumed at step {step} with weights of step {self.tree[node].step}")

    def make_weights(self, number: int, token: int, node: int) -> list[tuple[str, torch.Tensor]]:
        """Return the tensors of a number, which stands for a node from now on."""
        if self.node_of.setdefault(number, node) != node:
            self.say(f"S4: version {number} is {node}, and was {self.node_of[number]} before")
        return self.truth.make(number, token)

    def hear_trained(
        self,
        step: int,
        parent: int,
        groups: Sequence[Group],
        is_masked: Mapping[int, bool],
        branch: Hashable,
    ) -> int:
        """A learner trains groups on the weights `parent`; return what that makes.

        Args:
            branch: Tells trainings apart that differ in more than their tokens.
        """
        if self.tree[parent].step != step:
            self.say(f"S2: step {step} trains weights of step {self.tree[parent].step}")
        content: list[Hashable] = [branch]
        tickets, prompts = [], []
        for group in groups:
            tokens = self._judge_tokens(group, parent, is_masked)
            if tokens:
                content.append((group.ticket, tokens))
                tickets.append(group.ticket)
                prompts.append(self._prompt_of(group.ticket))
        self._judge_new(parent, tickets, prompts)
        self.num_steps += 1
        node = self.tree.train(parent, tuple(content), tuple(tickets), tuple(prompts)).id
        self.world.note(f"trained step {step} {tickets} {parent} -> {node}")
        return node

    def is_first_of(self, step: int) -> bool:
        """Tell whether a step is trained for the first time."""
        is_first = step not in self._reached
        self._reached.add(step)
        return is_first

    def _judge_tokens(
        self, group: Group, parent: int, is_masked: Mapping[int, bool]
    ) -> tuple[tuple[int, int, int], ...]:
        tokens = []
        for sample, one in enumerate(group.trajectories):
            for span in one.spans:
                node = self.node_of.get(span.version)
                if node is None:
                    self.say(
                        f"S4: ticket {group.ticket} has tokens of version {span.version}, which nobody made"
                    )
                elif is_masked[span.version]:
                    self.num_masked += span.end - span.start
                else:
                    self._judge_lag(group.ticket, parent, node, span.version)
                    tokens.append((sample, node, span.end))
        return tuple(tokens)

    def _judge_lag(self, ticket: int, parent: int, node: int, version: int) -> None:
        lag = self.tree.lag(parent, node)
        self.lag_max = max(self.lag_max, lag)
        if lag > self._max_lag:
            self.say(
                f"S3: ticket {ticket}: a token of version {version} is {lag} steps old, over {self._max_lag}"
            )

    def _judge_new(self, parent: int, tickets: Sequence[int], prompts: Sequence[Hashable]) -> None:
        for before in self.tree.path(parent):
            again = set(tickets) & set(before.tickets) or set(prompts) & set(before.prompts)
            if again:
                self.say(
                    f"S2: {sorted(map(str, again))} was trained at step {before.step - 1} of this lineage"
                )

    def _prompt_of(self, ticket: int) -> Hashable:
        self.recount(None)
        found = self._recount.tickets.get(ticket)
        return found.prompt if found is not None else ticket

    # --- replicas ---------------------------------------------------------------------------------

    def hear_answer(self, order: int, part: int, versions: frozenset[int]) -> None:
        """A replica has sampled the answers of a part of an evaluation, with tokens of these versions."""
        self._answers.setdefault((order, part), []).append(versions)
        if len(versions) > 1:  # none has a token where all have failed
            self.say(f"eval: part {part} of evaluation {order} was answered at versions {sorted(versions)}")

    def _judge_answers(self) -> None:
        answers = self._recount.evaluations.answers
        for order, part, version in answers[self._num_judged :]:
            found = self._answers.get((order, part), [])
            if frozenset((version,)) not in found and frozenset() not in found:
                self.say(f"eval: part {part} of evaluation {order} counts as one of version {version}")
        self._num_judged = len(answers)

    # --- the journal ------------------------------------------------------------------------------

    def cut_power(self) -> None:
        """Forget what may not have happened: no process is left that knows of it."""
        self.acknowledged.clear()
        self._loaded.clear()
        self._verified.clear()
        self._opened.clear()
        self._opened_at.clear()
        self.newest_token = 0
        self.recount(None)
        known = self._recount.num_versions
        self.node_of = {number: node for number, node in self.node_of.items() if number <= known}
        self.truth.published = self.last_node = 0

    def recount(self, state: LedgerState | None) -> None:
        """Go on with the account of the journal; compare it with the ledger's own, if that is at rest.

        After a first contradiction there is no account to go on with.
        """
        if self._is_contradicted:
            return
        try:
            self._read_commits()
            if state is not None:
                census = take_census(state)
                self._recount.check({**vars(census), "residue": census.residue})
        except (Violation, LookupError) as found:
            self._is_contradicted = True
            self.say(str(found) if isinstance(found, Violation) else f"S1: {found!r} is in no account")
            return
        self._judge_answers()
        if lost := self.acknowledged - self._recount.stored:
            self.say(f"S1: {sorted(lost)} were acknowledged as stored, and the journal has nothing of it")
            self.acknowledged -= lost

    def _read_commits(self) -> None:
        disk = self._disk
        if disk.num_cut != self._num_cut or self._num_read > len(disk.turns):
            self._recount, self._num_read, self._num_cut = Recount(self._prompt_at), 0, disk.num_cut
            self._recount.read(disk.events())
            self._num_judged = len(self._recount.evaluations.answers)
        else:
            self._recount.read(disk.events(self._num_read))
        self._num_read = len(disk.turns)

    @property
    def open_evaluations(self) -> list[int]:
        """Orders that have not ended."""
        return sorted(self._recount.evaluations.open)

    def judge_end(self, state: LedgerState | None) -> None:
        """Judge a run that is over: what is booked is what made the last weights."""
        self.recount(state)
        booked = self._recount.trained_at()
        for weights in self.tree.path(self.last_node or ROOT):
            if set(weights.tickets) != booked.get(weights.step - 1, set()):
                self.say(
                    f"S1: step {weights.step - 1} trained {sorted(weights.tickets)}, "
                    f"booked are {sorted(booked.get(weights.step - 1, set()))}"
                )
        audit = AuditRecount(self._max_lag)
        turns = enumerate(self._disk.turns)
        audit.take_all(event for number, turn in turns for event in unpack_commit(number, *turn))
        if findings := audit.conclude():
            self.say(f"S1: an audit of the journal finds {findings}")
