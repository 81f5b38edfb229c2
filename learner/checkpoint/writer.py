"""Writing checkpoints beside training: a thread on every rank, and rank 0's keeper of the cut.

  consumes: snapshots on the host     waits for: every rank's mark (in a thread)
  unblocked by: the last mark         produces: a sealed folder, then its commit in the journal
Training waits for a copy to the host, and for the checkpoint before if it is still being written: at
most `max_stall_s`, after which the new one is skipped and counted. Ranks tell rank 0 by a file that
they are done, with the digests of what they wrote: a thread must not call a collective of training. Files of
ranks that do not see rank 0's folder come to it by `node_folders`, after its own are written. Invariant: one
checkpoint is being written at a time, and the commit is made by the caller's thread.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec

from asyncrl.core.errors import CheckpointError, DeadlineExceeded
from asyncrl.core.runtime.faults import fault_point
from asyncrl.core.runtime.interface import Event, Runtime, Task
from asyncrl.core.runtime.threads import ThreadRuntime
from learner.checkpoint.node_folders import NodeFolders
from learner.checkpoint.snapshot import Snapshot, remove_files
from learner.checkpoint.store import CheckpointStore, Cut

log = logging.getLogger(__name__)

WRITE_DEADLINE_S = 1800.0
FIRST_LOOK_S, LONGEST_LOOK_S = 0.01, 0.32
"""Between two looks for the marks of other ranks, of which their disk tells nobody; the pause doubles."""
MARK = "written-"
MARK_AGAIN_S = 0.5

CommitCall = Callable[[int, str, Sequence[int]], None]
"""(step, digest, kept steps): the journal's commit."""


class Mark(msgspec.Struct, frozen=True):
    """File that a rank leaves once it is done: the reason why it could not write, or its files' digests.

    Attributes:
        digests: By path in the checkpoint's folder.
    """

    problem: str = ""
    digests: dict[str, str] = msgspec.field(default_factory=dict)


class BackgroundWriter:
    """Writes one rank's snapshots, one checkpoint at a time, each within `deadline_s`.

    Args:
        folders: Where not all ranks see rank 0's folder.

    Attributes:
        problem: Why the last one could not be written, empty if it was or is not done yet.
        has_marked: Set while none is being written.
    """

    def __init__(
        self,
        rank: int,
        deadline_s: float = WRITE_DEADLINE_S,
        runtime: Runtime | None = None,
        folders: NodeFolders | None = None,
    ) -> None:
        self._rank = rank
        self._folders = folders
        self._deadline_s = deadline_s
        self._runtime = runtime or ThreadRuntime()
        self._thread: Task | None = None
        self._folder = Path()
        self.problem = self._broken = ""
        self.has_marked = self._runtime.event()
        self.has_marked.set()

    def begin(self, folder: Path, take: Mapping[str, Callable[[], Snapshot]]) -> None:
        """Take snapshots and begin to write them; returns when they are taken.

        Args:
            folder: Where `prepare` said.
            take: By subfolder ("" for the policy), what copies the state to the host.

        Raises:
            DeadlineExceeded: As `join`.
            CheckpointError: The last one's files did not travel between nodes, and no later ones would.
        """
        self.join()
        if self._broken:
            raise CheckpointError(self._broken, hint="The learner starts again: see the log of each rank")
        snapshots = {name: call() for name, call in take.items()}
        self._folder = folder
        self.has_marked.clear()
        self._thread = self._runtime.spawn("checkpoint-writer", partial(self._write, folder, snapshots))

    def join(self) -> None:
        """Wait for the checkpoint that is being written, if any.

        Raises:
            DeadlineExceeded: It has not been written within the deadline.
        """
        if self._thread is None:
            return
        self._thread.join(self._deadline_s)
        if self._thread.is_alive():
            raise DeadlineExceeded(
                f"rank {self._rank} has not written its checkpoint into {self._folder} "
                f"in {self._deadline_s:g} s more",
                hint="Look at the disk that holds the run: it hangs or is too slow",
            )
        self._thread = None

    def _write(self, folder: Path, snapshots: Mapping[str, Snapshot]) -> None:
        problem, digests = "", dict[str, str]()
        try:
            for name, snapshot in snapshots.items():
                written = snapshot.write(folder / name)
                digests |= {str(Path(name) / file): digest for file, digest in written.items()}
        except Exception as error:  # the end of a thread: rank 0 must hear of it, whatever it was
            problem = f"rank {self._rank}: {error}"
            for name in snapshots:  # half a checkpoint is room that others may wait for
                remove_files(folder / name, self._rank)
        self.problem = problem
        try:
            self._tell(folder, Mark(problem, digests))
        except (
            RuntimeError,
            OSError,
            msgspec.DecodeError,
        ) as error:  # what was announced is missing
            self.problem = self._broken = f"rank {self._rank}: files of checkpoints do not travel: {error}"
            log.error("%s", self.problem)
        finally:
            self.has_marked.set()

    def _tell(self, folder: Path, mark: Mark) -> None:
        """Tell rank 0 that this rank is done, and bring it the files that it does not see."""
        folders = self._folders
        if folders is not None and folders.is_blind:
            folders.send(folder, mark.digests, msgspec.json.encode(mark))
            for name in mark.digests:
                with contextlib.suppress(OSError):  # rank 0 has it
                    (folder / name).unlink()
            for emptied in sorted({(folder / name).parent for name in mark.digests}, reverse=True):
                with contextlib.suppress(OSError):  # others of this node still write there
                    emptied.rmdir()
            return
        self._mark(folder, self._rank, mark)
        if folders is None or self._rank:
            return
        for rank in folders.blind:
            note, refused = folders.receive(folder, rank)
            told = msgspec.json.decode(note, type=Mark)
            self._mark(
                folder, rank, told if refused is None else Mark(f"the files of rank {rank}: {refused}")
            )

    def _mark(self, folder: Path, rank: int, mark: Mark) -> None:
        """Leave a rank's mark as soon as the disk takes it; for so long rank 0 waits."""
        path = folder / f"{MARK}{rank:05d}"
        draft = path.with_name(f".{path.name}")
        end = self._runtime.now() + self._deadline_s
        while self._runtime.now() < end:
            try:
                draft.write_bytes(msgspec.json.encode(mark))
                draft.replace(path)
                return
            except OSError as error:
                self.problem = mark.problem or f"rank {self._rank}: {error}"
            self._runtime.sleep(MARK_AGAIN_S)


@dataclass(frozen=True)
class _Sealed:
    digest: str = ""
    error: Exception | None = None
    write_s: float = 0.0
    num_bytes: int = 0


class CheckpointKeeper:
    """Rank 0's side: seals when every rank has written, commits, removes what is not kept.

    Example:
        if keeper.has_room():
            keeper.begin(step)
            yield Checkpoint(step)          # every rank: writer.begin(store.temporary(step), ...)
            keeper.seal_in_background(step, token)
        ...
        keeper.commit_finished()            # now and then
        keeper.commit_finished(wait_s=600)  # at the end

    Args:
        commit: Makes the checkpoint known to the journal.
        best_metric: Metric by which the store's best checkpoints are chosen.
        committed: Returns the steps whose checkpoints the journal knows; by default all that are there.

    `has_marked`: Of this process's writer; until it is set the marks are not looked for.
    """

    def __init__(
        self,
        store: CheckpointStore,
        commit: CommitCall,
        world_size: int,
        *,
        max_stall_s: float,
        best_metric: str = "",
        committed: Callable[[], Iterable[int]] | None = None,
        runtime: Runtime | None = None,
    ) -> None:
        self._store = store
        self._commit = commit
        self._world_size = world_size
        self._max_stall_s = max_stall_s
        self._best_metric = best_metric
        self._committed = committed or store.steps
        self._runtime = runtime or ThreadRuntime()
        self._thread: Task | None = None
        self._sealed = _Sealed()
        self._step = 0
        self._metrics: dict[str, float] = {}
        self.has_marked: Event | None = None

    def has_room(self) -> bool:
        """Wait for the checkpoint that is being written, at most `max_stall_s`; say whether it is done.

        Raises:
            CheckpointError: It could not be written.
        """
        began = self._runtime.now()
        has_room = self.commit_finished(self._max_stall_s)
        self._add("checkpoint/wait_s", self._runtime.now() - began)
        self._add("checkpoint/skipped", float(not has_room))
        return has_room

    def begin(self, step: int) -> Path:
        """Return the empty folder that every rank is to write into.

        Raises:
            CheckpointError: The disk takes none.
        """
        assert self._thread is None, "one checkpoint is written at a time"
        fault_point("checkpoint.begun", step)
        try:
            return self._store.prepare(step)
        except OSError as error:
            raise _unwritten(step, error) from error

    def seal_in_background(self, step: int, token: int, cut: Cut | None = None) -> None:
        """Seal the checkpoint of `step` as soon as all ranks have written theirs."""
        assert self._thread is None, "one checkpoint is written at a time"
        self._step = step
        self._thread = self._runtime.spawn("checkpoint-sealer", partial(self._seal, step, token, cut))

    def commit_finished(self, wait_s: float = 0.0) -> bool:
        """Commit what was sealed meanwhile; return whether nothing is being written any more.

        Raises:
            CheckpointError: A rank could not write, or not in time.
        """
        if self._thread is None:
            return True
        self._thread.join(wait_s)
        if self._thread.is_alive():
            return False
        self._thread = None
        if self._sealed.error is not None:
            self._store.discard(self._step)
            raise _unwritten(self._step, self._sealed.error) from self._sealed.error
        kept = self._store.kept_after(self._step, self._committed())
        self._commit(self._step, self._sealed.digest, kept)
        fault_point("checkpoint.committed", self._step)
        self._store.remove_all_but(kept)
        self._add("checkpoint/write_s", self._sealed.write_s)
        self._add("checkpoint/bytes", float(self._sealed.num_bytes))
        return True

    def note_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the score of the weights of `step` from `metrics`, if it is among them."""
        if self._best_metric in metrics:
            self._store.note_score(step, metrics[self._best_metric])

    def take_metrics(self) -> dict[str, float]:
        """Return what happened since the last call, by metric name; empty if nothing did."""
        taken, self._metrics = self._metrics, {}
        return taken

    def _seal(self, step: int, token: int, cut: Cut | None) -> None:
        began = time.perf_counter()
        folder = self._store.temporary(step)
        try:
            end = self._runtime.now() + WRITE_DEADLINE_S
            if self.has_marked is not None:
                self.has_marked.wait(WRITE_DEADLINE_S)
            left_s = max(0.0, end - self._runtime.now())
            digests = await_marks(folder, self._world_size, left_s, self._runtime)
            num_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
            digest = self._store.seal(step, token, cut, digests)
        except Exception as error:  # the end of a thread: `commit_finished` raises it, whatever it was
            self._sealed = _Sealed(error=error)
        else:
            self._sealed = _Sealed(digest, None, time.perf_counter() - began, num_bytes)

    def _add(self, name: str, value: float) -> None:
        self._metrics[name] = self._metrics.get(name, 0.0) + value


def _unwritten(step: int, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint of step {step} could not be written: {error}",
        hint="Make room on the disk that holds the run, or make it writable",
    )


def await_marks(
    folder: Path, world_size: int, deadline_s: float, runtime: Runtime | None = None
) -> dict[str, str]:
    """Wait until every rank has written, remove the marks and return the digests of all files, by path.

    Raises:
        CheckpointError: A rank could not write, or the deadline has passed.
    """
    runtime = runtime or ThreadRuntime()
    end, pause_s = runtime.now() + deadline_s, FIRST_LOOK_S
    while len(paths := sorted(folder.glob(f"{MARK}*"))) < world_size:
        if runtime.now() >= end:
            missing = world_size - len(paths)
            raise CheckpointError(f"{missing} of {world_size} ranks have not written in {deadline_s:g} s")
        runtime.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_LOOK_S)
    marks = [msgspec.json.decode(path.read_bytes(), type=Mark) for path in paths]
    if problems := [mark.problem for mark in marks if mark.problem]:
        raise CheckpointError("; ".join(problems))
    for path in paths:
        path.unlink()
    return {path: digest for mark in marks for path, digest in mark.digests.items()}
