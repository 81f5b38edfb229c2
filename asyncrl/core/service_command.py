"""Commands: what a supervisor tells a service, a struct for each and for its answer (pure).

Invariant: no command and no field of one is named in two places; what arrives is checked where it arrives.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Generic, TypeVar, cast

import msgspec

from asyncrl.core.errors import ConfigError, WireError
from asyncrl.core.rpc.message import Done, Message
from asyncrl.core.states import ServiceState

A = TypeVar("A", bound=Message)


class Command(Message, Generic[A], frozen=True, tag_field="command"):
    """A command that is answered with an `A`."""

    answer: ClassVar[type[Message]] = Done
    """Of which type an answer is."""

    @property
    def word(self) -> str:
        """The command as people read it."""
        return str(self.__struct_config__.tag)


# --- to every service -------------------------------------------------------------------------------


class DumpStacks(Command[Done], frozen=True, tag="dump_stacks"):
    """Write the stacks of all threads into the log, as SIGUSR1 has it done where Python does not get on."""


# --- to the buffer and the learner ------------------------------------------------------------------


class PauseState(Message, frozen=True):
    """Whether it is paused now."""

    paused: bool


class Pause(Command[PauseState], frozen=True, tag="pause"):
    """The buffer: grant no leases for training. The learner: take no batch after the step in progress."""

    answer = PauseState


class Unpause(Command[PauseState], frozen=True, tag="unpause"):
    """Take a pause back."""

    answer = PauseState


# --- to the buffer ----------------------------------------------------------------------------------


class Bound(Message, frozen=True):
    """The bound on lag under which tickets are admitted."""

    max_lag: int


class Tighten(Command[Bound], frozen=True, tag="tighten"):
    """Admit under a bound up to the configured one, until the next start."""

    answer = Bound
    max_lag: int


class DeregisterReplica(Command[Done], frozen=True, tag="deregister"):
    """The process of a replica has died: what it held is issued again at once."""

    replica: str


# --- to the learner ---------------------------------------------------------------------------------


class StepsDone(Message, frozen=True):
    """The last step that is done."""

    step: int


class WriteCheckpoint(Command[StepsDone], frozen=True, tag="checkpoint"):
    """Write a checkpoint after the step in progress."""

    answer = StepsDone


class Rows(Message, frozen=True):
    """Rows that were not taken yet, from index `first` of the learner's incarnation on."""

    first: int
    rows: tuple[Mapping[str, int | float], ...]


class HandOverRows(Command[Rows], frozen=True, tag="rows"):
    """Hand over the metric rows from index `after` on; those before it were taken, and are forgotten."""

    answer = Rows
    after: int


# --- to a replica and its receiver ------------------------------------------------------------------


class Standing(Message, frozen=True):
    """Current state of the service."""

    state: ServiceState


class Drain(Command[Standing], frozen=True, tag="drain"):
    """Hand back what is held, and end; groups in flight may still finish for `grace_s`."""

    answer = Standing
    grace_s: float = 0.0


class Promote(Command[Done], frozen=True, tag="promote"):
    """Take leases from here on."""


AnyCommand = (
    DumpStacks
    | Pause
    | Unpause
    | Tighten
    | DeregisterReplica
    | WriteCheckpoint
    | HandOverRows
    | Drain
    | Promote
)


def pack_command(command: Command[A]) -> bytes:
    """Return a command as bytes."""
    return msgspec.msgpack.encode(command)


def read_command(data: bytes) -> AnyCommand:
    """Return the command in `data`.

    Raises:
        WireError: It is none.
    """
    try:
        command: AnyCommand = msgspec.msgpack.decode(data, type=AnyCommand)
        return command
    except msgspec.MsgspecError as error:
        raise WireError(f"this is no command: {error}") from None


def pack_answer(answer: Message) -> bytes:
    """Return an answer as bytes."""
    return msgspec.msgpack.encode(answer)


def read_answer(command: Command[A], data: bytes) -> A:
    """Return the answer to a command.

    Raises:
        WireError: It is none of this command.
    """
    try:
        return msgspec.msgpack.decode(data, type=cast("type[A]", command.answer))
    except msgspec.MsgspecError as error:
        raise WireError(f"this is no answer to '{command.word}': {error}") from None


def unknown_command(who: str, command: AnyCommand, known: str = "") -> ConfigError:
    """Return the error of a service that cannot obey."""
    return ConfigError(f"{who} knows no command '{command.word}'", hint=known)
