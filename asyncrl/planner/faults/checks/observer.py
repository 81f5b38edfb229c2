"""Watches a simulated run from outside and keeps its own account of it.

Owns the promises S1 to S5, and that of evaluations. It is told what is sampled, loaded, trained and answered,
and not what anybody believes: weights are known by their content (`truth`), grants and verdicts by the
messages that carry them, accounts by the journal's turns (`recount`). Raises `Violation` at the moment when
a promise is broken.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from asyncrl.buffer.audit.recount import Recount as AuditRecount
from asyncrl.buffer.journals.journal import unpack_turn
from asyncrl.buffer.ledger.ledger import Ledger
from asyncrl.core.experience import Group
from asyncrl.planner.faults.checks.evaluations import judge
from asyncrl.planner.faults.checks.recount import Recount
from asyncrl.planner.faults.checks.truth import WeightsTree
from asyncrl.planner.faults.checks.violation import Violation
from asyncrl.planner.faults.services.engine import HELD_OUT_IDS
from asyncrl.planner.faults.services.journal import Disk

LEARNER_OPS = frozenset(
    {"resume", "register_version", "reserve", "fetch", "trained", "checkpointed", "request_evaluation"}
)


class Observer:
    """See the module.

    Args:
        prompt_at: The order in which prompts are to be drawn.
        num_held_out: Prompts of evaluations. has_unusable: One of them has no usable answer.

    Attributes:
        tree: All weights that were ever made.
        node_of: What a version number was published as.
        tally: How often something worth telling happened.
    """

    def __init__(
        self,
        max_lag: int,
        prompt_at: Callable[[int], tuple[int, int, int]],
        num_held_out: int = 0,
        *,
        has_unusable: bool = False,
    ) -> None:
        self.max_lag = max_lag
        self._num_held_out, self._has_unusable = num_held_out, has_unusable
        self.tree = WeightsTree()
        self.node_of: dict[int, int] = {}
        self.tally: Counter[str] = Counter()
        self.lag_max = 0
        self._prompt_at = prompt_at
        self._recount = Recount(prompt_at)
        self._num_read = self._num_cut = 0
        self._grants: dict[tuple[int, int], str] = {}
        self._newest_attempt: dict[int, int] = {}
        self._stored: set[tuple[int, int]] = set()
        self._served: dict[str, int] = {}
        self._obeyed: dict[str, int] = {}
        self._writers: dict[str, int] = {}
        self._pins: dict[str, str] = {}

    # --- the buffer -------------------------------------------------------------------------------

    def buffer_asked(self, ledger: Ledger, op: str, args: Mapping[str, Any]) -> Callable[..., None]:
        """A request is about to be handled; return what is to be told of its answer."""
        newest, token = ledger.state.token, args.get("token", 0)

        def answered(answer: Mapping[str, Any] | None) -> None:
            if answer is None:
                self.tally[f"refused/{op}"] += 1
                return
            if op in LEARNER_OPS and token < newest:
                raise Violation("S5", f"'{op}' of token {token} was answered, the newest is {newest}")
            if op == "lease":
                self._note_grants(args["replica"], answer["grants"])
            elif op == "push":
                self._note_push(args["replica"], (args["ticket"], args["attempt"]), answer["result"])

        return answered

    def _note_grants(self, replica: str, grants: Sequence[Mapping[str, Any]]) -> None:
        for grant in grants:
            ticket, attempt = grant["ticket"], grant["attempt"]
            if (ticket, attempt) in self._grants:
                raise Violation("S1", f"attempt {attempt} at ticket {ticket} was granted twice")
            self._grants[ticket, attempt] = replica
            self._newest_attempt[ticket] = max(attempt, self._newest_attempt.get(ticket, 0))
            self.tally["grants"] += 1

    def _note_push(self, replica: str, key: tuple[int, int], result: str) -> None:
        self.tally[f"push/{result}"] += 1
        if result != "stored":
            return
        if key in self._stored:
            raise Violation("S1", f"attempt {key[1]} at ticket {key[0]} was stored twice")
        if self._grants.get(key) != replica or self._newest_attempt[key[0]] > key[1]:
            raise Violation("S5", f"{replica} stored attempt {key[1]} at ticket {key[0]}, it lost that lease")
        self._stored.add(key)

    def power_was_cut(self, disk: Disk) -> None:
        """What was answered in the last moments may not have happened, and nobody is left who knows of it."""
        self._grants.clear()
        self._newest_attempt.clear()
        self._stored.clear()
        known = self.recount(disk, None).num_versions
        self.node_of = {number: node for number, node in self.node_of.items() if number <= known}

    def recount(self, disk: Disk, census: Mapping[str, Any] | None) -> Recount:
        """Go on with the account of the journal; compare it with the ledger's, if there is one (S1)."""
        if disk.num_cut != self._num_cut or self._num_read > len(disk.turns):
            self._recount, self._num_read, self._num_cut = Recount(self._prompt_at), 0, disk.num_cut
        self._recount.read(disk.events(self._num_read))
        self._num_read = len(disk.turns)
        self._judge_evaluations()
        if lost := self._stored - self._recount.stored:
            raise Violation(
                "S1", f"{sorted(lost)} were acknowledged as stored, and the journal has nothing of it"
            )
        if census is not None:
            self._recount.check(dict(census))
        return self._recount

    # --- evaluations ------------------------------------------------------------------------------

    def answered(
        self, replica: str, evaluation: int, version: int, tokens: Sequence[tuple[int, int]]
    ) -> None:
        """A replica has answered a part; `tokens`: (label, node) of each that it sampled for it."""
        truth = (version, self.node_of.get(version))
        if others := set(tokens) - {truth}:
            raise Violation(
                "eval",
                f"{replica} answers evaluation {evaluation} at version {version}, {truth[1]}, "
                f"with tokens of {sorted(others)}",
            )
        self.tally["evaluations/parts"] += 1

    def pins(self, receiver: str, replica: str) -> None:
        """A process of a replica has pinned its receiver, or, where it is empty, unpinned it."""
        self._pins[receiver] = replica

    def holds(self, receiver: str, replica: str) -> None:
        """A receiver keeps the process that polls it at its version."""
        if (holder := self._pins.get(receiver)) != replica:
            raise Violation("eval", f"{receiver} holds {replica} by the pin of {holder}")

    def _judge_evaluations(self) -> None:
        book = self._recount.evaluations
        fresh, book.fresh = book.fresh, []
        for number in fresh:
            (version, metrics), step = book.results[number], book.steps[number]
            node = self.node_of[version]
            wrong = judge(metrics, node, self._num_held_out, may_be_refused=self._has_unusable)
            if self.tree[node].step < step:
                wrong = f"weights of step {self.tree[node].step} answered"
            if wrong:
                raise Violation("eval", f"evaluation {number} of step {step} at version {version}: {wrong}")
            self.tally["evaluations/refused" if self._has_unusable else "evaluations/done"] += 1

    # --- the learner ------------------------------------------------------------------------------

    def trained(
        self,
        step: int,
        parent: int,
        groups: Sequence[Group],
        is_masked: Callable[[int], bool],
        prompt_of: Callable[[int], Hashable],
        branch: int,
    ) -> int:
        """A learner trains `groups` on the weights `parent`; return what that makes.

        Args:
            is_masked: Whether the learner masks a token of a version number.
            branch: Tells apart trainings that differ in more than their tokens.
        """
        if self.tree[parent].step != step:
            raise Violation("S2", f"step {step} trains weights of step {self.tree[parent].step}")
        content: list[Hashable] = [branch]
        tickets, prompts = [], []
        for group in groups:
            tokens = self._trained_tokens(group, parent, is_masked)
            if tokens:
                content.append((group.ticket, tokens))
                tickets.append(group.ticket)
                prompts.append(prompt_of(group.ticket))
        self._check_new(parent, tickets, prompts)
        self.tally["steps"] += 1
        return self.tree.train(parent, tuple(content), tuple(tickets), tuple(prompts)).id

    def _trained_tokens(
        self, group: Group, parent: int, is_masked: Callable[[int], bool]
    ) -> tuple[tuple[int, int, int], ...]:
        tokens = []
        if group.prompt_ids.tolist() == HELD_OUT_IDS.tolist():
            raise Violation("eval", f"ticket {group.ticket}: an answer of an evaluation is trained")
        for sample, one in enumerate(group.trajectories):
            for span in one.spans:
                nodes = Counter(one.response_ids[span.start : span.end].tolist())
                truth = self.node_of[span.version]
                if set(nodes) != {truth}:
                    raise Violation(
                        "S4",
                        f"ticket {group.ticket}: tokens stamped {span.version} were sampled by weights "
                        f"{sorted(nodes)}, that version is {truth}",
                    )
                if is_masked(span.version):
                    self.tally["tokens_masked"] += span.end - span.start
                    continue
                self._check_lag(group.ticket, parent, truth, span.version)
                tokens.append((sample, truth, span.end))
                self.tally["tokens_trained"] += span.end - span.start
        return tuple(tokens)

    def _check_lag(self, ticket: int, parent: int, truth: int, version: int) -> None:
        lag = self.tree.lag(parent, truth)
        self.lag_max = max(self.lag_max, lag)
        if lag > self.max_lag:
            raise Violation(
                "S3",
                f"ticket {ticket}: a token of version {version} is {lag} steps old, bound {self.max_lag}",
            )

    def _check_new(self, parent: int, tickets: Sequence[int], prompts: Sequence[Hashable]) -> None:
        for before in self.tree.path(parent):
            again = set(tickets) & set(before.tickets) or set(prompts) & set(before.prompts)
            if again:
                raise Violation("S2", f"{again} was trained at step {before.step - 1} of the same lineage")

    def finished(self, node: int, disk: Disk, census: Mapping[str, Any]) -> None:
        """The run is over: what the journal calls trained is what made the last weights (S1, S2)."""
        booked = self.recount(disk, census).trained_at()
        for weights in self.tree.path(node):
            if set(weights.tickets) != booked.get(weights.step - 1, set()):
                raise Violation(
                    "S1",
                    f"step {weights.step - 1} trained {sorted(weights.tickets)}, "
                    f"booked are {sorted(booked.get(weights.step - 1, set()))}",
                )
        audit = AuditRecount(self.max_lag)
        audit.take_all(
            event for number, turn in enumerate(disk.turns) for event in unpack_turn(number, *turn)
        )
        if findings := audit.conclude():
            raise Violation("S1", f"an audit of the journal finds {findings}")
        if len(booked) > self.tree[node].step:
            raise Violation("S1", f"{len(booked)} steps are booked, the weights have {self.tree[node].step}")

    # --- weights ----------------------------------------------------------------------------------

    def written(self, publisher: str, token: int, number: int, node: int) -> None:
        """A publisher has taken a version of a learner with `token`."""
        if token < self._writers.get(publisher, 0):
            raise Violation("S5", f"{publisher} took version {number} of token {token}, it knows a newer one")
        if self.node_of.setdefault(number, node) != node:
            raise Violation("S4", f"version {number} is {node}, and was {self.node_of[number]} before")
        self.tally["versions"] += 1

    def opened(self, publisher: str, token: int) -> None:
        """A publisher knows of the learner with `token`."""
        self._writers[publisher] = max(token, self._writers.get(publisher, 0))

    def obeys(self, peer: str, token: int) -> None:
        """A process does what the coordinator with `token` has ordered."""
        if token < self._obeyed.get(peer, 0):
            raise Violation("S5", f"{peer} obeys coordinator {token} after {self._obeyed[peer]}")
        self._obeyed[peer] = token

    def handed_over(self, receiver: str, number: int, nodes: Sequence[int]) -> None:
        """A receiver lets its engine have a copy; `nodes`: whose weights each bucket is."""
        if set(nodes) != {self.node_of.get(number)}:
            raise Violation("S4", f"{receiver} hands over {list(nodes)} as version {number}, not verified")

    def serves(self, engine: str, number: int, nodes: Sequence[int]) -> None:
        """An engine moves its label to `number`."""
        if set(nodes) != {self.node_of.get(number)}:
            raise Violation("S4", f"{engine} serves {list(nodes)} as version {number}")
        if number <= self._served.get(engine, 0):
            raise Violation("S4", f"{engine} goes from version {self._served[engine]} to {number}")
        self._served[engine] = number
        self.tally["swaps"] += 1
