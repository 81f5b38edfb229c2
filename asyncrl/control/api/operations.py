"""Operations of the control API: a struct for each request and answer, named here alone (pure).

The command line asks for `POST /<name>` with the request's fields as JSON; the supervisor answers with the
answer's.
"""

from __future__ import annotations

from collections.abc import Mapping

from asyncrl.core.rpc.message import Message, Operation
from asyncrl.core.states import RunState


class Scale(Message, frozen=True):
    """Asks for `replicas` rollout replicas."""

    replicas: int


class DrainReplica(Message, frozen=True):
    """Asks rollout.`index` to finish what it has and leave; another one takes its place."""

    index: int


class Pause(Message, frozen=True):
    """Asks for no more leases, and for no step after the one in progress."""


class Unpause(Message, frozen=True):
    """Takes a pause back."""


class WriteCheckpoint(Message, frozen=True):
    """Asks for a checkpoint after the step in progress."""


class Tighten(Message, frozen=True):
    """Asks to admit under another bound on lag, at most the configured one, until the run ends."""

    max_lag: int


class Stop(Message, frozen=True):
    """Asks the run to checkpoint and end."""


class Begun(Message, frozen=True):
    """Number of wanted replicas, and those that were started or drain for it."""

    replicas: int
    started: tuple[str, ...] = ()
    draining: tuple[str, ...] = ()


class Paused(Message, frozen=True):
    """Pause state of the run, and the services that have not acknowledged it yet."""

    paused: bool
    unreached: tuple[str, ...] = ()


class CheckpointAsked(Message, frozen=True):
    """The last step that is done."""

    step: int


class Tightened(Message, frozen=True):
    """The bound on lag from here on."""

    max_lag: int


class Stopping(Message, frozen=True):
    """The state of the run."""

    state: RunState = RunState.STOPPING


SCALE = Operation("scale", Scale, Begun)
DRAIN = Operation("drain", DrainReplica, Begun)
PAUSE = Operation("pause", Pause, Paused)
UNPAUSE = Operation("unpause", Unpause, Paused)
CHECKPOINT = Operation("checkpoint", WriteCheckpoint, CheckpointAsked)
TIGHTEN = Operation("tighten", Tighten, Tightened)
STOP = Operation("stop", Stop, Stopping)
AnyRequest = Scale | DrainReplica | Pause | Unpause | WriteCheckpoint | Tighten | Stop
"""Request to the supervisor."""
REQUESTS: Mapping[str, type[AnyRequest]] = {
    one.name: one.request for one in (SCALE, DRAIN, PAUSE, UNPAUSE, CHECKPOINT, TIGHTEN, STOP)
}
