"""Writing checkpoints beside training: bounded stall, one at a time, no commit of what is not whole."""

import contextlib
import threading

import pytest
import torch

from asyncrl.buffer.client import LearnerClient
from asyncrl.core.config.tree import Config
from asyncrl.core.errors import CheckpointError, DeadlineExceeded
from asyncrl.core.rpc import Client
from asyncrl.core.runtime.threads import ThreadEvent, ThreadRuntime
from learner.checkpoint import CheckpointStore, Commit, Cut
from learner.checkpoint.pieces import whole
from learner.checkpoint.reader import StateReader
from learner.checkpoint.snapshot import KINDS, PieceState, Snapshot
from learner.checkpoint.writer import BackgroundWriter, CheckpointKeeper, await_marks
from learner.leader.leader import Leader
from tests.buffer.parts import make_store, serving

WAIT_S = 30.0


class Journal:
    def __init__(self):
        self.commits = []

    def commit(self, step, digest, kept):
        self.commits.append((step, digest, list(kept)))


@pytest.fixture
def store(tmp_path):
    return CheckpointStore(tmp_path / "checkpoints", keep=2, keep_best=1)


@pytest.fixture
def journal():
    return Journal()


def keep(store, journal, world_size=1, max_stall_s=0.0):
    return CheckpointKeeper(
        store, journal.commit, world_size, max_stall_s=max_stall_s, best_metric="accuracy"
    )


def take(rank=0, world_size=1, fill=1.0):
    piece = whole(f"w{rank}", (2, 2))
    state = PieceState(piece, {kind: torch.full((4,), fill) for kind in KINDS}, 1.0)
    return Snapshot(rank, {"world_size": world_size}, (state,), {}, {})


def test_a_checkpoint_of_two_ranks_and_two_models_is_committed_once_both_have_written(store, journal):
    keeper = keep(store, journal, world_size=2)
    assert keeper.has_room()
    folder = keeper.begin(5)
    keeper.seal_in_background(5, 1, Cut(3, {"kl": {"coefficient": 0.5}}))
    writers = [BackgroundWriter(rank) for rank in range(2)]
    writers[0].begin(folder, {"": lambda: take(0, 2), "critic": lambda: take(0, 2)})
    assert not keeper.commit_finished(0.2), "the second rank has not written"
    assert journal.commits == []
    writers[1].begin(folder, {"": lambda: take(1, 2), "critic": lambda: take(1, 2)})
    assert keeper.commit_finished(WAIT_S)
    ((step, digest, kept),) = journal.commits
    assert (step, kept) == (5, [5])
    store.verify(Commit(1, 5, digest))
    assert store.cut(5) == Cut(3, {"kl": {"coefficient": 0.5}})
    with StateReader(store.folder(5) / "critic") as reader:
        assert set(reader.shapes) == {"w0", "w1"}
    metrics = keeper.take_metrics()
    assert metrics["checkpoint/skipped"] == 0.0
    assert metrics["checkpoint/bytes"] > 2 * 2 * 48
    assert keeper.take_metrics() == {}


def test_one_that_is_due_while_another_is_written_is_skipped_after_the_wait_and_counted(store, journal):
    keeper = keep(store, journal, max_stall_s=0.05)
    folder = keeper.begin(5)
    keeper.seal_in_background(5, 1)
    assert not keeper.has_room()
    metrics = keeper.take_metrics()
    assert metrics["checkpoint/skipped"] == 1.0
    assert metrics["checkpoint/wait_s"] >= 0.05
    BackgroundWriter(0).begin(folder, {"": take})
    assert keeper.commit_finished(WAIT_S)
    assert keeper.has_room()


def test_training_goes_on_while_a_checkpoint_is_written_and_the_cut_stays(store, journal):
    keeper, writer, live = keep(store, journal), BackgroundWriter(0), torch.ones(4)
    may_write = ThreadEvent()

    class Slow(Snapshot):
        def write(self, folder):
            assert may_write.wait(WAIT_S)
            return super().write(folder)

    def snapshot():
        piece = PieceState(whole("w", (4,)), {kind: live.clone() for kind in KINDS}, 1.0)
        return Slow(0, {"world_size": 1}, (piece,), {}, {})

    folder = keeper.begin(1)
    writer.begin(folder, {"": snapshot})
    keeper.seal_in_background(1, 1)
    live.zero_()  # a step of training
    may_write.set()
    assert keeper.commit_finished(WAIT_S)
    with StateReader(store.folder(1)) as reader:
        assert torch.equal(reader.read_whole("w"), torch.ones(4))


def test_a_rank_that_cannot_write_is_named_and_nothing_is_committed(store, journal):
    keeper = keep(store, journal)
    folder = keeper.begin(5)
    (folder / "critic").write_text("a file where a folder must be")
    BackgroundWriter(0).begin(folder, {"": take, "critic": take})
    keeper.seal_in_background(5, 1)
    with pytest.raises(CheckpointError, match=r"step 5 could not be written: rank 0: .*critic"):
        keeper.commit_finished(WAIT_S)
    assert journal.commits == []
    assert store.steps() == []


def test_rank_0_reads_no_file_that_the_ranks_have_digested_and_a_byte_that_changes_later_is_found(
    store, journal, monkeypatch
):
    monkeypatch.setattr("learner.checkpoint.store.digest_file", None)
    keeper = keep(store, journal, world_size=2)
    folder = keeper.begin(5)
    for rank in range(2):
        writer = BackgroundWriter(rank)
        writer.begin(folder, {"": lambda rank=rank: take(rank, 2), "critic": lambda rank=rank: take(rank, 2)})
        writer.join()
    path = folder / "critic" / "rank-00001.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))  # after its rank has digested it
    keeper.seal_in_background(5, 1)
    assert keeper.commit_finished(WAIT_S)
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match=r"critic/rank-00001\.safetensors is torn or altered"):
        store.verify_whole(5)
    (store.folder(5) / "critic" / path.name).write_bytes(data)
    store.verify(Commit(1, 5, journal.commits[0][1]))


@pytest.mark.parametrize("harm", [lambda path: path.unlink(), lambda path: path.with_suffix(".x").touch()])
def test_a_folder_with_other_files_than_the_ranks_name_is_not_committed(store, journal, harm):
    keeper = keep(store, journal)
    folder = keeper.begin(5)
    writer = BackgroundWriter(0)
    writer.begin(folder, {"": take})
    writer.join()
    harm(folder / "rank-00000.json")
    keeper.seal_in_background(5, 1)
    with pytest.raises(CheckpointError, match=r"holds other files than its ranks have written: \['rank-"):
        keeper.commit_finished(WAIT_S)
    assert journal.commits == []


def test_ranks_that_do_not_write_in_time_are_counted(tmp_path):
    (tmp_path / "written-00000").touch()
    with pytest.raises(CheckpointError, match="1 of 2 ranks have not written"):
        await_marks(tmp_path, 2, deadline_s=0.05)


def test_the_sealer_looks_for_no_mark_while_its_own_rank_writes(store, journal):
    may_write = ThreadEvent()

    class Slow(Snapshot):
        def write(self, folder):
            assert may_write.wait(WAIT_S)
            return take().write(folder)

    class Counting(ThreadRuntime):
        num_sleeps = 0

        def sleep(self, seconds):
            self.num_sleeps += 1
            super().sleep(seconds)

    runtime, writer = Counting(), BackgroundWriter(0)
    keeper = CheckpointKeeper(store, journal.commit, 1, max_stall_s=0.0, runtime=runtime)
    keeper.has_marked = writer.has_marked
    writer.begin(keeper.begin(5), {"": lambda: Slow(0, {}, (), {}, {})})
    keeper.seal_in_background(5, 1)
    assert not keeper.commit_finished(0.05)
    may_write.set()
    assert keeper.commit_finished(WAIT_S)
    assert (runtime.num_sleeps, [step for step, *_ in journal.commits]) == (0, [5])


def test_the_best_by_the_named_metric_stays_for_export_but_not_in_the_journal(store, journal):
    keeper, writer = keep(store, journal, max_stall_s=WAIT_S), BackgroundWriter(0)
    for step, accuracy in ((1, 0.9), (2, 0.1), (3, 0.2), (4, 0.3)):
        assert keeper.has_room()
        writer.begin(keeper.begin(step), {"": take})
        keeper.seal_in_background(step, 1)
        keeper.note_metrics(step, {"accuracy": accuracy, "other": 7.0})
        keeper.note_metrics(step, {"other": 9.0})
    assert keeper.commit_finished(WAIT_S)
    assert store.steps() == [1, 3, 4]
    assert journal.commits[-1][2] == [3, 4]


def test_the_host_copy_of_a_rank_is_not_taken_again_before_it_is_written(tmp_path):
    events, may_write = [], ThreadEvent()

    class Slow(Snapshot):
        def write(self, folder):
            assert may_write.wait(WAIT_S)
            events.append("written")
            return {}

    def again():
        events.append("taken again")
        return take()

    writer = BackgroundWriter(0)
    writer.begin(tmp_path, {"": lambda: Slow(0, {}, (), {}, {})})
    threading.Timer(0.1, may_write.set).start()
    writer.begin(tmp_path, {"": again})
    writer.join()
    assert events == ["written", "taken again"]


def test_a_disk_that_hangs_is_named_and_does_not_hold_up_a_rank_for_ever(tmp_path):
    may_write = ThreadEvent()

    class Hanging(Snapshot):
        def write(self, folder):
            assert may_write.wait(WAIT_S)
            return {}

    writer = BackgroundWriter(3, deadline_s=0.05)
    writer.begin(tmp_path, {"": lambda: Hanging(3, {}, (), {}, {})})
    said = rf"rank 3 has not written its checkpoint into {tmp_path} in 0\.05 s"
    with pytest.raises(DeadlineExceeded, match=said):
        writer.begin(tmp_path, {"": take})
    may_write.set()
    await_marks(tmp_path, 1, deadline_s=WAIT_S)


def test_a_score_waits_for_a_checkpoint_that_is_still_being_written(store):
    for step in (5, 6):
        store.note_score(step, 0.5)
    assert store.scores() == {5: 0.5, 6: 0.5}


def test_scores_are_taken_at_every_order_however_few_evaluations_the_buffer_tells_of(store, monkeypatch):
    monkeypatch.setattr("asyncrl.buffer.service.MAX_EVALUATIONS_TOLD", 1)
    config = Config.model_validate(
        {
            "model": {"path": "none"},
            "data": {"train": "none", "eval": "none"},
            "reward": {"fn": "digit_sort"},
            "learner": {"steps": 9},
            "eval": {"every_steps": 1},
            "checkpoint": {"keep_best": 1},
        }
    )
    with (
        serving(make_store()) as service,
        contextlib.closing(LearnerClient(service.status().address)) as client,
        contextlib.closing(Client(ThreadRuntime(), service.status().address)) as replica,
    ):
        client.open("learner")
        client.register_version(0)
        leader = Leader(config, client, lambda token: None, store)
        for leader.step in range(4):
            leader.publishing.request_evaluation(leader.step)
            args = {"replica": "a", "version": 1, "metrics": {"accuracy": leader.step / 4}}
            replica.call("evaluated", id=leader.publishing.last_evaluation, **args)
        assert store.scores() == {0: 0.0, 1: 0.25, 2: 0.5}, "the last one comes with the next order"
