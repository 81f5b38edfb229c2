"""Fleet state machine: decides which services to start, end and give up, from events about them (pure).

    STARTING -> SYNCING -> READY (<-> SUSPECT) -> DRAINING -> removed      any -> DEAD -> STARTING

Owns the units of a run. It must never do what it decides: effects are carried out by `reconciler/`, in order,
those of one moment before the next. Time is lived time: a span in which nobody called, because the whole
machine stood still, counts for at most `MAX_STEP_S`, so it is held against no service.
Invariants: a service is started only while it is down, and killed before that if it ever ran; every `Gone` of
a service that should be there leads to a `Start`, at once or when the back-off ends, for a replica whose
restarts are spent to `Retire` and minutes later a `Start`, for one that never worked, where another has, to
`Forgo`, or to `GiveUp`; while a replica works no death of others does, unless none may be restarted at all;
after a `GiveUp` nothing is asked for any more.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field

from asyncrl.control.fleet.budget import Budget
from asyncrl.control.fleet.messages import (
    Begin,
    Cause,
    Drain,
    Effect,
    End,
    Event,
    Finish,
    Forgo,
    GiveUp,
    Gone,
    Halted,
    Heard,
    Kill,
    Leave,
    Promote,
    Retire,
    Start,
    Tick,
    Wanted,
)
from asyncrl.control.fleet.units import (
    ENDED,
    LEARNER,
    STARTING_STATES,
    SYNCING,
    WAITING,
    Member,
    Stage,
    Unit,
    core_keys,
    key_of,
    make_unit,
    replica_key,
    replica_names,
)

MAX_STEP_S = 10.0
MAX_ALIKE = 3
"""Failures of the learner with one error and no step further: the next would take the same batch."""
NEVER_WORKED = "; it did so before, and it has never worked"
MAX_SPENT = 2
"""Times in a row that the restarts of every replica are spent, without work in between: the run ends."""


@dataclass(frozen=True)
class FleetRules:
    """Limits of the machine: restarts and deadlines.

    Attributes:
        num_ranks: Of the learner; `num_publishers`, of its nodes.
        max_restarts: Of a unit that does no work in between; 0 ends the run at the first death.
        start_deadline_s: Time that a service may be starting, syncing or draining.
        silence_s: Time without an answer after which a service with a suspended process is dead;
            `long_silence_s` if it runs, as the machine may be busy; `start_deadline_s` if it starts: imports
            alone kept a learner from answering for over a minute where 25 others wanted the two processors.
        replica_silence_s: As `silence_s`, for a replica: its leases go to others, but nothing is lost
            with it, and vLLM needs most of the minute in which it is to be replaced (40 s on two cores).
        suspect_s: Time without an answer after which a service is shown as suspect.
        never_again: Units that cannot be restarted, by key, with the reason.
    """

    num_ranks: int = 1
    num_publishers: int = 1
    max_restarts: int = 5
    start_deadline_s: float = 300.0
    silence_s: float = 20.0
    replica_silence_s: float = 10.0
    long_silence_s: float = 60.0
    suspect_s: float = 5.0
    never_again: Mapping[str, str] = field(default_factory=dict)


class FleetMachine:
    """The units of a run. `apply` takes an event and returns actions, in order.

    Attributes:
        losses: Services that were found to be gone; the reader that reports them empties the list.
        is_short: Fewer replicas are wanted than were asked for: one of them could not be started.
    """

    def __init__(self, rules: FleetRules, now: float) -> None:
        self.rules = rules
        self.units: dict[str, Unit] = {}
        self.wanted = 0
        self.wanted_standby = 0
        self.given_up: GiveUp | None = None
        self.lived = 0.0
        self.losses: list[Gone] = []
        self.is_short = False
        self._clock = now
        self._effects: list[Effect] = []
        self._is_settled = False

    # --- reading --------------------------------------------------------------------------

    @property
    def names(self) -> list[str]:
        """Return the services that have a process, in the order in which they were first started."""
        members = (member for unit in self.units.values() for member in unit.members.values())
        return [member.name for member in members if not member.is_down]

    @property
    def replicas(self) -> list[Unit]:
        """Return the replicas that lease or are to."""
        return [unit for unit in self._all_replicas() if not (unit.is_standby or unit.is_leaving)]

    @property
    def standbys(self) -> list[Unit]:
        return [unit for unit in self._all_replicas() if unit.is_standby and not unit.is_leaving]

    @property
    def leavers(self) -> list[Unit]:
        return [unit for unit in self._all_replicas() if unit.is_leaving]

    def stages(self) -> dict[str, Stage]:
        """Return where each unit stands, by key."""
        return {key: unit.stage(self.lived, self.rules.suspect_s) for key, unit in self.units.items()}

    @property
    def is_degraded(self) -> bool:
        """Whether something that has worked before does not, or there are fewer replicas than wanted."""
        ill = (Stage.DEAD, Stage.SUSPECT, Stage.STARTING, Stage.SYNCING)
        return any(
            stage is Stage.RETIRED or (self.units[key].has_been_up and stage in ill)
            for key, stage in self.stages().items()
        )

    def silence_of(self, name: str) -> float | None:
        """Return for how many seconds `name` has not answered, None for one without a process."""
        found = self._find(name)
        return None if found is None else self.lived - found[1].heard_at

    def has_come_up(self, name: str) -> bool:
        """Whether `name` has been able to work since it was started."""
        found = self._find(name)
        return found is not None and found[1].came_up

    def _all_replicas(self) -> list[Unit]:
        return [unit for unit in self.units.values() if unit.is_replica]

    # --- events ---------------------------------------------------------------------------

    def apply(self, event: Event, now: float) -> list[Effect]:
        """Apply `event` of time `now` (seconds, monotonic) and return the actions that it requires."""
        self.lived += min(max(0.0, now - self._clock), MAX_STEP_S)
        self._clock = now
        if self.given_up is not None:
            return []
        match event:
            case Begin():
                self._begin(event)
            case Heard():
                self._hear(event)
            case Halted():
                if (found := self._find(event.name)) is not None:
                    found[1].is_halted = True
            case Gone():
                self._lose(event)
            case Wanted():
                self._want(event)
            case Leave():
                self._let_go(event.index)
            case Finish():
                self._finish()
            case Tick():
                self._tick()
        if self.given_up is None:
            self._reconcile()
        effects, self._effects = self._effects, []
        return effects

    def _begin(self, event: Begin) -> None:
        """Replicas first: an engine takes longest to start."""
        self.wanted, self.wanted_standby, self._is_settled = event.replicas, event.standby, False
        self._reconcile()
        for key, names in core_keys(self.rules.num_ranks, self.rules.num_publishers).items():
            self.units[key] = make_unit(key, names, self.rules.max_restarts)
            self._start_members(self.units[key])

    def _finish(self) -> None:
        if (unit := self.units.get(LEARNER)) is not None:
            unit.is_ending, unit.due = True, None

    def _want(self, event: Wanted) -> None:
        self.is_short = self._is_settled = False
        self.wanted = self.wanted if event.replicas is None else event.replicas
        self.wanted_standby = self.wanted_standby if event.standby is None else event.standby
        self._reconcile()  # it lets retired ones go first
        for unit in [unit for unit in self._all_replicas() if unit.is_retired]:
            unit.budget = Budget(self.rules.max_restarts)
            self._start_members(unit)

    def _find(self, name: str) -> tuple[Unit, Member] | None:
        """Return a service that has a process, and its unit."""
        unit = self.units.get(key_of(name))
        member = unit.members.get(name) if unit else None
        return None if unit is None or member is None or member.is_down else (unit, member)

    def _hear(self, event: Heard) -> None:
        if (found := self._find(event.name)) is None:
            return
        unit, member = found
        if event.state == ENDED and unit.key != LEARNER and not unit.is_leaving:
            self._lose(Gone(event.name, "ended unasked"))
            return
        member.hear(event.state, self.lived)
        if unit.key == LEARNER:
            unit.step = max(unit.step, event.num_done)
        elif event.name.startswith("rollout."):
            unit.num_answers = event.num_done
        if event.state == WAITING or (event.state == SYNCING and not self._can_sync()):
            member.since = self.lived  # there is no room, or no weights to be had: not its fault
        if event.state == ENDED and unit.is_leaving and event.name.startswith("rollout."):
            self._remove(unit)
        elif unit.is_up:
            unit.has_been_up = True
            unit.budget.note_up(unit.num_answers if unit.is_replica else self._step)

    @property
    def _step(self) -> int:
        """Return the furthest step that the run has trained."""
        learner = self.units.get(LEARNER)
        return 0 if learner is None else learner.step

    def _can_sync(self) -> bool:
        """Tell whether all services that weights come from are up."""
        sources = (self.units.get(key) for key in (LEARNER, "publisher", "weight_sync"))
        return all(unit is not None and unit.is_up for unit in sources)

    def _lose(self, event: Gone) -> None:
        found = self._find(event.name)
        if found is None or found[0].is_done:
            return
        unit = found[0]
        self.losses.append(event)
        if unit.is_leaving and event.cause is not Cause.FINAL:
            self._remove(unit)
            return
        why = self._why_never_again(unit, event)
        unit.last_reason, unit.failed_at = event.reason, self.lived
        if why is not None and self._can_forgo(unit):
            self._forgo(unit, event.name, f"{event.name} {event.reason}{why}")
            return
        if why is not None:
            reason = f"{event.name} {event.reason}{why}"
            self._give_up(event.name, reason, would_repeat=why == NEVER_WORKED)
            return
        delay_s = unit.budget.ask(self.lived)
        if delay_s is None and self._is_hopeless(unit):
            self._give_up(event.name, f"{event.name} {event.reason}{self._spent(unit)}")
            return
        for name in unit.members if delay_s is None else unit.falls_with(event.name):
            self._kill_member(unit.members[name])
        self._promote_for(unit)
        if delay_s is None:
            self._retire(unit, f"{event.name} {event.reason}{self._spent(unit)}")
            return
        self._plan_restart(unit, delay_s)

    def _why_never_again(self, unit: Unit, event: Gone) -> str | None:
        """Return why it is not to be started again, in words that follow the reason; None if it may be."""
        if event.cause is Cause.FINAL:
            return ""
        if unit.key in self.rules.never_again:
            return f"; {self.rules.never_again[unit.key]}"
        is_same = event.cause is Cause.ERROR and unit.last_reason == event.reason
        if is_same and not unit.has_been_up:
            return NEVER_WORKED
        if unit.key == LEARNER and self._count_alike(unit, is_same=is_same) >= MAX_ALIKE:
            return f"; it did so {MAX_ALIKE} times and came no further than step {unit.step}"
        return None

    def _plan_restart(self, unit: Unit, delay_s: float) -> None:
        unit.due = self.lived + delay_s
        unit.num_restarts += 1
        self._start_due(unit)

    def _count_alike(self, unit: Unit, *, is_same: bool) -> int:
        is_alike = is_same and unit.step <= unit.failed_step
        unit.num_alike, unit.failed_step = unit.num_alike + 1 if is_alike else 1, unit.step
        return unit.num_alike

    def _can_forgo(self, unit: Unit) -> bool:
        """Tell whether a replica never worked while another does or did, so that it is not how the run is."""
        others = (other for other in self._all_replicas() if other is not unit and not other.is_leaving)
        return unit.is_replica and not unit.has_been_up and any(other.has_been_up for other in others)

    def _forgo(self, unit: Unit, name: str, reason: str) -> None:
        """Go on with a replica less."""
        self._remove(unit)
        if unit.is_standby or self._promote(1):
            self.wanted_standby = max(0, self.wanted_standby - 1)
        else:
            self.wanted = max(0, self.wanted - 1)
        self.is_short = True
        rest = f"the run goes on with {self.wanted} replicas and {self.wanted_standby} that stand by"
        self._effects.append(Forgo(name, f"{reason}; {rest}"))

    def _is_hopeless(self, unit: Unit) -> bool:
        """Tell whether the run ends now that the restarts of `unit` are spent.

        It ends for any unit but a replica. For a replica it goes on while another one works or may come to
        work, and else as long as one of them, its restarts spent, has not had a back-off since it worked.
        """
        if not unit.is_replica or self.rules.max_restarts == 0:
            return True
        replicas = [other for other in self._all_replicas() if not other.is_leaving]
        if any(not other.is_retired for other in replicas if other is not unit):
            return False
        if not any(other.has_been_up for other in replicas):
            return True
        return all(other.budget.num_spent + (other is unit) >= MAX_SPENT for other in replicas)

    def _retire(self, unit: Unit, reason: str) -> None:
        """Leave a replica alone for minutes."""
        back_in_s = unit.budget.renew()
        unit.is_retired = True
        self._plan_restart(unit, back_in_s)
        num_working = sum(other.is_up for other in self.replicas)
        rest = f"the run goes on with {num_working} of {self.wanted} replicas"
        if not num_working:
            rest = "no replica works now"
        how = f"it is started again in {back_in_s:g} s, or by 'asyncrl scale rollout={self.wanted}'"
        self._effects.append(Retire(f"rollout.{unit.index}", f"{reason}; {how}; {rest}", back_in_s))

    def _spent(self, unit: Unit) -> str:
        most = self.rules.max_restarts
        if most == 0:
            return ""
        work = "finished no answer" if unit.is_replica else "no step was trained"
        return f"; it was restarted {most} times already, and {work} in between"

    def _give_up(self, name: str, reason: str, *, would_repeat: bool = False) -> None:
        self.given_up = GiveUp(name, reason, would_repeat)
        self._effects.append(self.given_up)

    def _tick(self) -> None:
        for unit in list(self.units.values()):
            if unit.is_leaving and self.lived - (unit.leaving_since or 0.0) > self.rules.start_deadline_s:
                self._remove(unit)  # its leases run out, and its prompts are issued again
                continue
            for member in list(unit.members.values()):
                if self.given_up is None and (reason := self._why_overdue(unit, member)):
                    self._lose(Gone(member.name, *reason))
            self._start_due(unit)

    def _why_overdue(self, unit: Unit, member: Member) -> tuple[str, Cause] | None:
        """Return the fault of a service that is silent or makes no progress, None without one."""
        if member.is_down or unit.is_done or member.state == ENDED:
            return None
        halted_s = self.rules.replica_silence_s if unit.is_replica else self.rules.silence_s
        limit_s = halted_s if member.is_halted else self.rules.long_silence_s
        may_judge = member.came_up or member.is_halted
        if may_judge and self.lived - member.heard_at > limit_s:
            return f"sent no heartbeat for {limit_s:g} s", Cause.DEATH
        limit_s = self.rules.start_deadline_s
        if member.state in STARTING_STATES and self.lived - member.since > limit_s:
            return f"was still {member.state} after {limit_s:g} s", Cause.ERROR
        return None

    # --- replicas -------------------------------------------------------------------------

    def _reconcile(self) -> None:
        """Have as many replicas as wanted, and as many that stand by."""
        if self._is_settled:  # called at every event
            return
        replicas = self.replicas
        num_promoted = self._promote(self.wanted - len(replicas))
        self._grow(self.wanted - len(replicas) - num_promoted, is_standby=False)
        self._shrink(replicas, self.wanted)
        standbys = self.standbys
        self._grow(self.wanted_standby - len(standbys), is_standby=True)
        self._shrink(standbys, self.wanted_standby)
        self._is_settled = True

    def _grow(self, num_more: int, *, is_standby: bool) -> None:
        """Make so many replicas more, of the lowest indices that are free."""
        free = (index for index in itertools.count() if replica_key(index) not in self.units)
        for index in itertools.islice(free, max(0, num_more)):
            key, names = replica_key(index), replica_names(index)
            unit = self.units[key] = make_unit(key, names, self.rules.max_restarts, is_standby=is_standby)
            self._start_members(unit)

    def _shrink(self, units: list[Unit], num_left: int) -> None:
        """Let the most dispensable go: retired ones, then those not yet up, then the newest."""
        units = sorted(units, key=lambda unit: (not unit.is_retired, unit.is_up, -unit.index))
        for unit in units[: max(0, len(units) - num_left)]:
            self._let_go(unit.index)

    def _promote(self, number: int) -> int:
        """Let up to so many that stand by take leases, and return how many."""
        ready = [unit for unit in self.standbys if unit.is_up][: max(0, number)]
        for unit in ready:
            unit.is_standby = False
            self._effects.append(Promote(unit.index))
        return len(ready)

    def _promote_for(self, unit: Unit) -> None:
        """Let one that stands by take the place of a replica that lost its engine."""
        is_whole = all(member.is_down for member in unit.members.values())
        if unit.is_replica and not unit.is_standby and is_whole and self.wanted_standby and self._promote(1):
            unit.is_standby = True

    def _let_go(self, index: int) -> None:
        unit = self.units.get(replica_key(index))
        if unit is None or unit.is_leaving:
            return
        engine = unit.members[f"rollout.{index}"]
        unit.leaving_since, unit.due, self._is_settled = self.lived, None, False
        if engine.is_down or not engine.came_up:  # it holds nothing
            self._remove(unit)
        else:
            self._effects.append(Drain(index))

    def _remove(self, unit: Unit) -> None:
        """Remove a leaving replica, and end its remaining processes."""
        del self.units[unit.key]
        rollout = unit.members[f"rollout.{unit.index}"]
        for member in unit.members.values():
            if not member.is_down:
                self._effects.append(End(member.name) if rollout.state == ENDED else Kill(member.name))

    # --- starting -------------------------------------------------------------------------

    def _kill_member(self, member: Member) -> None:
        if not member.is_down:
            self._effects.append(Kill(member.name))
            member.is_down = True

    def _start_due(self, unit: Unit) -> None:
        if unit.due is not None and self.lived >= unit.due and self.given_up is None:
            self._start_members(unit)

    def _start_members(self, unit: Unit) -> None:
        unit.due, unit.is_retired = None, False
        for member in unit.members.values():
            if member.is_down:
                member.begin(self.lived)
                self._effects.append(Start(member.name, is_standby=unit.is_standby))
