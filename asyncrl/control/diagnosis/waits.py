"""Waits of a run: the service that sets its pace, and the chain of those who wait when it stands (pure).

    learner -> buffer -> replica -> weight sync -> publisher -> learner

`diagnose` judges by the newest row of metrics and the services' last statuses. Causes of a full stop come
first: an obstacle that a service reports, a missing service, a pause. Only then are idle shares compared.
`waiting_edges` follows the edges from the learner to the service that does not move.
Invariant: never more than a guess from observations, and every guess names the observations behind it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from asyncrl.core.obstacle import Obstacle
from asyncrl.core.rpc.message import Message
from asyncrl.core.states import SERVICE_ENDS, ServiceState
from asyncrl.core.status.service import BUFFER, COORDINATOR, LEARNER, PUBLISHER, ServiceStatus
from asyncrl.core.status.statuses import Statuses

Metrics = Mapping[str, float]

IDLE, CLEARLY_MORE = 0.1, 0.1
"""Shares of time from which a side counts as waiting, and as waiting more than the other."""
FEW = 16
"""Replicas that a sentence names one by one."""
COMING = (ServiceState.STARTING, ServiceState.SYNCING)
LOST = (ServiceState.FAILED, ServiceState.DEAD, ServiceState.SILENT)
LEARNER_IDLE, ROLLOUT_IDLE = "perf/learner_idle/", "perf/rollout_idle/"
HOLDS = {
    "buffer": ("buffer.0", "the learner waits for answers of the buffer"),
    "checkpoint": ("checkpoint", "the learner waits for the checkpoint before to be written"),
    "publisher": ("publisher.0", "the learner waits for the publisher"),
}
"""Causes of the learner's waits besides batches: the service at fault, and the reason."""
NO_STAGES = ("timing_s/step", "timing_s/other", "timing_s/wait")
STAGES = {
    "update_actor": "forward, backward and optimizer",
    "old_log_prob": "log-probs under the weights at the start of the step",
    "ref": "log-probs of the reference policy",
    "update_critic": "updating the critic",
    "values": "the critic's values",
    "save_checkpoint": "copying the state for a checkpoint",
    "update_weights": "handing over new weights",
}


class Diagnosis(Message, frozen=True):
    """The bottleneck (`""`: none), the reason, and the learner's wait (`""`: it does not wait)."""

    who: str = ""
    why: str = ""
    learner_waits_for: str = ""


def diagnose(metrics: Metrics, statuses: Statuses, obstacles: Sequence[Obstacle] = ()) -> Diagnosis:
    """Return the bottleneck of the run.

    Args:
        metrics: The newest row, empty before there is one.
        statuses: Of all services, by name, as they were last heard.
        obstacles: Of the run, those that block it first.
    """
    return next(_stops(statuses, obstacles), None) or _compare(metrics, statuses)


def _stops(statuses: Statuses, obstacles: Sequence[Obstacle]) -> Iterator[Diagnosis]:
    """Yield the causes of a full stop, the most specific first."""
    blocking = [one for one in obstacles if one.blocks]
    yield from (_of_obstacle(one) for one in blocking if not one.service.startswith("rollout."))
    for name, status in statuses.items():
        if status.state in LOST and not name.startswith(("rollout.", "receiver.")):
            yield Diagnosis(name, f"{name} is {status.state}", _waits_for(name))
    for name in sorted(statuses):
        if name.startswith(("learner.", "buffer.")) and statuses[name].state in COMING:
            yield Diagnosis(name, f"{name} is {statuses[name].state}", _waits_for(name))
    if any(one is not None and one.paused for one in (statuses.buffer, statuses.learner)):
        yield Diagnosis("operator", "the run is paused; 'asyncrl unpause' continues it", "operator")
    yield from (_of_obstacle(one) for one in blocking)
    replicas = statuses.replicas
    if replicas and not any(map(_is_ready, replicas.values())):
        yield Diagnosis("rollout", f"no replica is READY: {_states_of(replicas)}", "rollout")
    if LEARNER in statuses and not replicas:
        yield Diagnosis("rollout", "there are no rollout replicas; 'asyncrl scale rollout=N'", "rollout")


def _states_of(replicas: Mapping[str, ServiceStatus]) -> str:
    """Return the state of each replica, of many how many are in which."""
    if len(replicas) <= FEW:
        return ", ".join(f"{name} {status.state}" for name, status in sorted(replicas.items()))
    counts = Counter(status.state for status in replicas.values())
    return ", ".join(f"{count} {state}" for state, count in counts.most_common())


def _of_obstacle(obstacle: Obstacle) -> Diagnosis:
    return Diagnosis(obstacle.service, obstacle.sentence, _waits_for(obstacle.service))


def _waits_for(name: str) -> str:
    """Return the service that the learner waits for while `name` is away: never itself."""
    return "" if name.startswith("learner.") else name


def _compare(metrics: Metrics, statuses: Statuses) -> Diagnosis:
    metrics = _without_spares(metrics)
    learner, rollout = metrics.get("perf/learner_idle_share"), metrics.get("perf/rollout_idle_share")
    if learner is None or rollout is None:
        if is_scoring(statuses):
            return Diagnosis("reward", _scoring(statuses), "reward")
        if LEARNER in statuses:
            why = f"the first batch is being generated{tell_dropped(statuses)}"
            return Diagnosis("rollout", why, "rollout")
        return Diagnosis("", "nothing was measured yet")
    if (held := _held_up(learner, metrics)) is not None:
        return held
    if learner >= IDLE and rollout >= IDLE and abs(learner - rollout) < 2 * CLEARLY_MORE:
        return _between(learner, rollout, metrics, statuses) or _few_leases(learner, rollout)
    if learner - rollout > CLEARLY_MORE:
        return _between(learner, rollout, metrics, statuses) or _generation(learner, rollout, statuses)
    if rollout - learner > CLEARLY_MORE:
        return _learner(learner, rollout, metrics)
    return Diagnosis("", f"balanced: {_shares(learner, rollout)}", "rollout" if learner >= IDLE else "")


def _without_spares(metrics: Metrics) -> Metrics:
    """Return the row with the replicas' shares those of the time that was not spent standing by.

    A warm spare waits for nobody.
    """
    spare = metrics.get(f"{ROLLOUT_IDLE}standby", 0.0)
    if not 0.0 < spare < 1.0:
        return metrics
    shares = {name: value / (1.0 - spare) for name, value in metrics.items() if name.startswith(ROLLOUT_IDLE)}
    idle = (metrics.get("perf/rollout_idle_share", 0.0) - spare) / (1.0 - spare)
    return {**metrics, **shares, "perf/rollout_idle_share": max(0.0, idle)}


def _held_up(learner: float, metrics: Metrics) -> Diagnosis | None:
    """Return the learner's largest wait if it exceeds that for batches, else None."""
    waits = {cause: metrics.get(f"{LEARNER_IDLE}{cause}", 0.0) for cause in HOLDS}
    cause, share = max(waits.items(), key=lambda item: item[1])
    if share < IDLE or share <= learner:
        return None
    who, why = HOLDS[cause]
    return Diagnosis(who, f"{why}: {share:.0%} of a step", who)


def _between(learner: float, rollout: float, metrics: Metrics, statuses: Statuses) -> Diagnosis | None:
    """Return the cause between prompts and batches other than the engines, None if there is none."""
    group = metrics.get(f"{ROLLOUT_IDLE}group", 0.0)
    if is_scoring(statuses) or (group >= IDLE and group >= rollout / 2):
        return Diagnosis("reward", _scoring(statuses), "reward")
    weights = sum(metrics.get(f"{ROLLOUT_IDLE}{cause}", 0.0) for cause in ("weights", "swap", "fenced"))
    step = statuses.learner.step if statuses.learner is not None else 0
    served = max(
        (one.step for one in statuses.told_replicas.values()), default=0 if statuses.replicas else step
    )
    is_behind = rollout >= IDLE and learner - rollout < 2 * CLEARLY_MORE and step > served
    if is_behind or (weights >= IDLE and weights >= rollout / 2):
        behind = f": the learner is at step {step}, they serve step {served}" if step > served else ""
        why = f"replicas wait for weights or swap them{behind}"
        return Diagnosis("weight_sync", f"{why} ({_shares(learner, rollout)})", "rollout")
    return None


def _generation(learner: float, rollout: float, statuses: Statuses) -> Diagnosis:
    """The learner waits, and the replicas have work."""
    why = f"generation is slower than training: {_shares(learner, rollout)}"
    return Diagnosis("rollout", f"{why}{_lacking(statuses) or '; more replicas would help'}", "rollout")


def _few_leases(learner: float, rollout: float) -> Diagnosis:
    why = f"replicas get too few leases, and the learner too few groups: {_shares(learner, rollout)}"
    return Diagnosis(
        "buffer.0", f"{why}; see staleness.max_lag, ready_batches, buffer.memory_bytes", "rollout"
    )


def _learner(learner: float, rollout: float, metrics: Metrics) -> Diagnosis:
    """Return the bottleneck while replicas wait: the learner, with its longest activity."""
    stages = {
        name: value
        for name, value in metrics.items()
        if name.startswith("timing_s/") and not name.startswith(NO_STAGES)
    }
    total = metrics.get("timing_s/step") or 0.0
    why = f"training is slower than generation: {_shares(learner, rollout)}"
    if stages and total:
        name, longest = max(stages.items(), key=lambda item: item[1])
        stage = name.removeprefix("timing_s/")
        why += f"; {STAGES.get(stage, stage)} takes {longest / total:.0%} of a step"
    return Diagnosis("learner", why)


def _is_ready(status: ServiceStatus) -> bool:
    return status.state == ServiceState.READY


def is_scoring(statuses: Statuses) -> bool:
    """Tell whether replicas hold groups of which nothing is being generated."""
    known = [one for one in statuses.told_replicas.values() if one.engine is not None]
    held = sum(one.in_flight_groups for one in known)
    return held > 0 and not any(one.in_flight_requests for one in statuses.engines.values())


def tell_dropped(statuses: Statuses) -> str:
    """Return why groups are dropped while the run's first batch does not fill, nothing while none is."""
    buffer = statuses.buffer
    dropped = {} if buffer is None or buffer.trained else buffer.dropped
    why = ", ".join(sorted(reason for reason, count in dropped.items() if count))
    return f"; groups are dropped ({why}), see 'asyncrl inspect rollouts --dropped'" if why else ""


def _scoring(statuses: Statuses) -> str:
    held = sum(one.in_flight_groups for one in statuses.told_replicas.values())
    what = f"{held} groups are open, and no engine works on any"
    return f"answers wait for their rewards, tools or environments: {what}"


def _lacking(statuses: Statuses) -> str:
    """Return which replicas do not generate, empty if all do."""
    away = {name: status for name, status in statuses.replicas.items() if not _is_ready(status)}
    return f"; not generating: {_states_of(away)}" if away else ""


def _shares(learner: float, rollout: float) -> str:
    return f"the learner waits {learner:.0%} of its time, the replicas {rollout:.0%} of theirs"


WORKING = (ServiceState.READY, ServiceState.PINNED)
ABSENT = (*SERVICE_ENDS, ServiceState.SILENT, ServiceState.STARTING, ServiceState.WAITING, None)


@dataclass(frozen=True)
class Edge:
    """`waiter` waits for `whom`; `why` is the reason of the delay."""

    waiter: str
    whom: str
    why: str

    def __str__(self) -> str:
        return f"{self.waiter} waits for {self.whom}: {self.why}"


def waiting_edges(statuses: Statuses, groups_per_step: int) -> list[Edge]:
    """Return the edges of the stalled chain of waits, from the learner on; never empty."""
    return list(_from_learner(statuses, groups_per_step))


def _from_learner(statuses: Statuses, groups_per_step: int) -> Iterator[Edge]:
    for name, rank in statuses.of_kind("learner").items():
        if rank.state in ABSENT:
            yield Edge("the run", name, f"it is {rank.state}")
            return
    if (state := statuses.state(BUFFER)) in ABSENT:
        yield Edge(LEARNER, BUFFER, f"it is {state}")
        return
    buffer = statuses.buffer
    num_reserved = buffer.pending.reserved if buffer is not None else 0
    num_stored = buffer.stored_groups if buffer is not None else 0
    if num_reserved or num_stored >= groups_per_step:
        num_groups = num_reserved + num_stored
        yield Edge("the run", LEARNER, f"it has {num_groups} groups to train on, and is not done")
        return
    yield Edge(LEARNER, BUFFER, f"{num_stored} of {groups_per_step} groups are stored")
    yield from _from_buffer(statuses)


def _from_buffer(statuses: Statuses) -> Iterator[Edge]:
    replicas, told = statuses.replicas, statuses.told_replicas
    if not replicas:
        yield Edge(BUFFER, "rollout", "there is no replica")
    for name in sorted(replicas):
        if name not in told or not told[name].standby:
            yield from _from_replica(name, statuses)


def _from_replica(name: str, statuses: Statuses) -> Iterator[Edge]:
    state, buffer = statuses.state(name), statuses.buffer
    num_leased = buffer.leases.get(name, 0) if buffer is not None else 0
    if state in ABSENT:
        yield Edge(BUFFER, name, f"it is {state}")
    elif num_leased:
        yield Edge(BUFFER, name, f"it holds {num_leased} groups")
    elif state not in WORKING:
        yield Edge(BUFFER, name, f"it is {state}")
        yield from _from_weights(name, "it has no weights that it may serve", statuses)
    elif (step := _served(name, statuses)) < (statuses.learner.step if statuses.learner is not None else 0):
        yield from _from_weights(name, f"it serves step {step}", statuses)
    else:
        yield Edge(name, BUFFER, "it is granted no lease")


def _served(name: str, statuses: Statuses) -> int:
    """Return the step of the weights that a replica serves, 0 while it does not say."""
    told = statuses.told_replicas.get(name)
    return 0 if told is None else told.step


def _from_weights(name: str, why: str, statuses: Statuses) -> Iterator[Edge]:
    """Yield the edge of a replica that waits for weights: publisher, coordinator or its receiver."""
    receiver = f"receiver.{name.partition('.')[2]}"
    for source in (COORDINATOR, *(statuses.of_kind("publisher") or (PUBLISHER,)), receiver):
        if (state := statuses.state(source)) in ABSENT:
            yield Edge(name, source, f"{why}, and {source} is {state}")
            return
    yield Edge(name, COORDINATOR, why)
