"""Recorder of one rank's training data: a thread writes while the learner continues.

  consumes: fetched groups, the step's order and metrics     waits for: room among `MAX_PENDING` steps
  unblocked by: the disk                                      produces: `<run>/record`
Training waits only where the disk is behind by `MAX_PENDING` steps, at most `max_stall_s`, and not again
before the disk goes on; then, or if the disk fails, the step is lost to the record, which is counted, and the
run goes on. Only the thread touches the disk. Invariant: the record
holds one branch of steps: what a restore goes back behind is removed, and with it what the branch before it
had trained.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Mapping, Sequence

from asyncrl.core.errors import WireError
from asyncrl.core.experience import Group
from learner.batch_fetcher import Source
from learner.orders import Adjust, Train
from learner.record.batch_store import BatchStore, RecordedStep, RecordedWeights
from learner.record.settings import Settings

log = logging.getLogger(__name__)

MAX_PENDING = 2
LAST_STEP = 10**8
Job = tuple[str, Callable[[], int]]
"""Loss if the job fails, "" for none; and its function, which returns the bytes that it wrote."""
UNREPEATABLE = (
    "perf/cpu_memory_used_gb",
    "perf/process_memory_gb",
    "perf/max_memory_allocated_gb",
    "perf/max_memory_reserved_gb",
    "guard/out_of_memory",
    "stream/overlapped_s",
)
"""Metrics of a step that tell of the machine and its time."""


class Recorder:
    """The record of one share of every batch.

    Args:
        share: This rank's, of `num_shares`. The rank of share 0 keeps the folder: it removes old steps.
        seed: `run.seed`, kept with every step.
        max_stall_s: Time that training may wait for the disk.
        settings: Those of this start of the run, kept for its steps.
    """

    def __init__(
        self,
        batch_store: BatchStore,
        seed: int,
        max_stall_s: float,
        share: int = 0,
        num_shares: int = 1,
        settings: Settings | None = None,
    ) -> None:
        self._batch_store = batch_store
        self._seed = seed
        self._max_stall_s = max_stall_s
        self._share = share
        self._num_shares = num_shares
        self._settings = settings
        self._fetched: list[Group] = []
        self._pending: queue.Queue[Job | None] = queue.Queue(MAX_PENDING)
        self._owed: list[Job] = []
        self._is_behind = False
        self._lock = threading.Lock()
        self._num_bytes = self._num_lost = 0
        self._first = 0
        self._owed.append(("", self._open))
        self._thread = threading.Thread(target=self._write, name="recorder", daemon=True)
        self._thread.start()

    def note_fetch(self, groups: Sequence[Group]) -> None:
        """Hear of groups that were fetched for the step in progress."""
        self._fetched.extend(groups)

    def take(self, order: Train, adjustment: Adjust, metrics: Mapping[str, float]) -> None:
        """Keep what was fetched since the last call as the step of `order`."""
        fetched, self._fetched = self._fetched, []
        recorded = RecordedStep(
            order=order,
            adjustment=adjustment,
            groups=fetched,
            metrics=repeatable(metrics),
            seed=self._seed,
            share=self._share,
            num_shares=self._num_shares,
            settings=self._settings,
        )
        self._put(f"step {order.step}", lambda: self._batch_store.write(recorded))

    def note_weights(self, step: int, digest: str, bucket_bytes: int) -> None:
        """Keep the digest of the weights that were published at `step`."""
        found = RecordedWeights(step, digest, bucket_bytes)
        self._put(f"the weights of step {step}", lambda: self._batch_store.write_weights(found))

    def restart_at(self, step: int) -> None:
        """Forget the steps from `step` on: they are trained again, or belong to an abandoned branch."""
        self._fetched = []
        self._owed.append(("", lambda: self._forget(step)))
        self.flush()

    def remove_before(self, step: int) -> None:
        """Remove the steps that no kept checkpoint is before: they could not be trained again."""
        if self._share == 0 and step > self._first and self._put("", lambda: self._remove(range(step))):
            self._first = step

    def flush(self) -> None:
        """Wait until what was taken is on disk, at most `max_stall_s`."""
        done = threading.Event()

        def mark() -> int:
            done.set()
            return 0

        if self._put("", mark) and not done.wait(self._max_stall_s):
            self._is_behind = True
            log.warning("the record is behind: the disk has not taken it in %g s", self._max_stall_s)

    def take_metrics(self) -> dict[str, float]:
        """Return what was written and lost since the last call, by metric name."""
        with self._lock:
            taken = {"record/bytes": float(self._num_bytes), "record/lost_steps": float(self._num_lost)}
            self._num_bytes = self._num_lost = 0
        return taken

    def close(self) -> None:
        """Write what is left."""
        self.flush()
        if self._hand_over(None):  # else the disk hangs: the thread ends with the process
            self._thread.join(self._max_stall_s)

    def _put(self, what: str, write: Callable[[], int]) -> bool:
        """Have the thread do it, after the removals that found no room before; return whether it will."""
        while self._owed and self._hand_over(self._owed[0]):
            self._owed.pop(0)
        if self._owed or not self._hand_over((what, write)):
            if what:
                self._lose(what, "the disk is too slow")
            return False
        return True

    def _hand_over(self, job: Job | None) -> bool:
        """Wait for room, but only once for a disk that hangs."""
        try:
            self._pending.put(job, timeout=0.0 if self._is_behind else self._max_stall_s)
        except queue.Full:
            self._is_behind = True
        else:
            self._is_behind = False
            return True
        return False

    def _write(self) -> None:
        while (job := self._pending.get()) is not None:
            what, write = job
            try:
                num_bytes = write()
            except (OSError, WireError) as error:
                self._fail(what, str(error))
            else:
                with self._lock:
                    self._num_bytes += num_bytes

    def _open(self) -> int:
        self._batch_store.open(self._share)
        return 0

    def _forget(self, step: int) -> int:
        self._batch_store.remove(range(step, LAST_STEP), self._share)
        if self._share == 0:
            self._batch_store.remove_weights(range(step + 1, LAST_STEP))
        return 0

    def _remove(self, steps: range) -> int:
        self._batch_store.remove(steps)
        return 0

    def _fail(self, what: str, why: str) -> None:
        if what:
            self._lose(what, why)
        else:
            log.warning("the record could not be tidied: %s", why)

    def _lose(self, what: str, why: str) -> None:
        log.warning("%s is lost to the record: %s", what, why)
        with self._lock:
            self._num_lost += 1


class Recording:
    """An fetcher whose groups a recorder hears of."""

    def __init__(self, fetcher: Source, recorder: Recorder) -> None:
        self._fetcher = fetcher
        self._recorder = recorder

    def fetch(self, token: int, tickets: Sequence[int]) -> list[Group]:
        """As the intake's `fetch`."""
        groups = self._fetcher.fetch(token, tickets)
        self._recorder.note_fetch(groups)
        return groups


def repeatable(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics that the same batch on the same weights gives again."""
    return {name: float(value) for name, value in metrics.items() if name not in UNREPEATABLE}
