"""The one exception tree.

Every error says what happened and where; `hint` says what to do. Each class also is the
standard library type that it stands for, so `except ValueError` works as a reader expects.
"""

from __future__ import annotations


class AsyncrlError(Exception):
    """Base of all errors that asyncrl raises on purpose.

    Args:
        message: Event and place, in one sentence.
        hint: Remedy for the reader.
    """

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}. {self.hint}" if self.hint else self.message

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.message, self.hint))


def _rebuild(cls: type[AsyncrlError], message: str, hint: str) -> AsyncrlError:
    return cls(message, hint=hint)


class ConfigError(AsyncrlError, ValueError):
    """The configuration, or what it names, cannot be used. The CLI exits with code 2."""


class UnknownRun(ConfigError, LookupError):
    """There is no run of that name, living or ended. The CLI exits with code 4."""


class DataError(AsyncrlError, ValueError):
    """A data file or one of its rows cannot be used."""


class WireError(AsyncrlError, ValueError):
    """Bytes from a peer that do not have the agreed form."""


class WrongVersion(WireError):
    """A message is of another version of the wire's schema."""


class RemoteError(AsyncrlError, RuntimeError):
    """A service refused or failed a call."""


class Refused(AsyncrlError, RuntimeError):
    """The run cannot do what is asked of it, as things are; another time it may."""


class NotAllowed(AsyncrlError, PermissionError):
    """The key that was shown does not open what was asked for."""


class DeadlineExceeded(AsyncrlError, TimeoutError):
    """A wait reached its deadline."""


class ConnectionLost(DeadlineExceeded, ConnectionError):
    """The service hung up before it answered; it may have acted all the same."""


class FencedError(AsyncrlError, PermissionError):
    """The caller holds an older fencing token than the ledger's newest."""


class LedgerError(AsyncrlError, RuntimeError):
    """A transition that the ledger forbids."""


class CheckpointError(AsyncrlError, RuntimeError):
    """A checkpoint is torn, altered or not committed."""


class NoJournal(CheckpointError):
    """A run's folder has no journal: it never began, or was removed."""


class SyncError(AsyncrlError, RuntimeError):
    """A weight-sync round failed."""


class SegmentGone(SyncError, FileNotFoundError):
    """A shared-memory segment is not, or no longer, there: its owner has ended."""


class EngineError(AsyncrlError, RuntimeError):
    """The inference engine failed or cannot be used."""


class ServiceFailed(AsyncrlError, RuntimeError):
    """A service of the run ended with an error."""


class WouldRepeat(ServiceFailed):
    """A service of the run ended with an error that the next start would meet again."""


class FolderRemoved(ServiceFailed):
    """Somebody has removed the folder of a live run: there is nothing left to go on from."""


BY_NAME: dict[str, type[AsyncrlError]] = {
    cls.__name__: cls
    for cls in (
        ConfigError,
        DataError,
        WireError,
        WrongVersion,
        RemoteError,
        Refused,
        NotAllowed,
        DeadlineExceeded,
        ConnectionLost,
        FencedError,
        LedgerError,
        CheckpointError,
        SyncError,
        SegmentGone,
        EngineError,
        ServiceFailed,
        WouldRepeat,
        FolderRemoved,
    )
}
