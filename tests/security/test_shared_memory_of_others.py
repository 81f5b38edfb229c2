"""Another user of the machine and `/dev/shm`: his files are as if they were not there, ours are closed."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

import msgpack
import pytest

from asyncrl.cli.doctor.machine import check_leftovers
from asyncrl.control.machine.processes import SHM, remove_leftovers, remove_segments, shared_memory_of
from asyncrl.core.errors import ConfigError
from asyncrl.core.files.private import make_private
from asyncrl.core.staleness import PolicyVersion
from tests.other_user import NOBODY, SOMEBODY, acting_as
from tests.weight_sync.cluster import load, model, running_cluster
from weight_sync.memory.manifest import Bucket, Manifest, TensorSpec, plan
from weight_sync.memory.writer import digest_of

EVIL = b"EVIL" * 1024


@pytest.fixture
def run_id() -> Iterator[str]:
    """The id of a run, which everybody can read off `/tmp`; what bears it is removed afterwards."""
    made = uuid.uuid4().hex[:8]
    yield made
    for path in SHM.glob(f"*asyncrl-{made}*"):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def plant(folder: Path, run_id: str) -> list[Path]:
    """Leave, as another user, all that a publisher or a receiver of the run could take for its own."""
    layout = plan([TensorSpec("w", "uint8", (len(EVIL),))], len(EVIL))
    manifest = Manifest(PolicyVersion(9, 8), layout, (Bucket(len(EVIL), digest_of(())),))
    planted = [SHM / f"sem.asyncrl-{run_id}-publisher.0-x"]
    with acting_as(NOBODY):
        planted[0].touch()
        (SHM / f"asyncrl-{run_id}-0").mkdir()
        (SHM / f"asyncrl-{run_id}-0").chmod(0o777)  # others can remove what is in it
        for start in (f"{SHM}/asyncrl-{run_id}-", f"{SHM}/asyncrl-{run_id}-0/"):
            segment = Path(f"{start}publisher-t0-1-1")
            segment.write_bytes(EVIL)
            legacy = {"token": 2**62, "path": str(segment), "manifest": manifest.to_bytes()}
            Path(f"{start}publisher-legacy").write_bytes(msgpack.packb(legacy))
            Path(f"{start}receiver.0-x").touch()
            planted += [segment, Path(f"{start}publisher-legacy"), Path(f"{start}receiver.0-x")]
            for path in planted[-3:]:
                path.chmod(0o666)
        link = SHM / f"asyncrl-{run_id}-1"
        link.symlink_to(folder)
    return [*planted, link]


def attack(folder: Path) -> list[str]:
    """Return what another user could do to the folder, once he sees its name."""
    path, done = str(folder), []
    acts = {
        "list": lambda: os.listdir(path),
        "write": lambda: Path(path, "publisher-legacy").write_bytes(b""),
        "make": lambda: os.mkdir(f"{path}/receiver.0-x"),
        "link": lambda: os.symlink("/etc", f"{path}/receiver.0-y"),
        "rename": lambda: os.rename(path, f"{path}-gone"),
        "remove": lambda: os.rmdir(path),
    }
    with acting_as(NOBODY):
        for name, act in acts.items():
            try:
                act()
                done.append(name)
            except PermissionError:
                continue
    return done


def test_weights_reach_a_replica_whatever_another_user_has_put_into_shared_memory(
    tmp_path: Path, run_id: str
) -> None:
    planted = plant(tmp_path, run_id)
    with running_cluster(run_id=run_id) as cluster:
        receiver = cluster.start("receiver.0")
        cluster.wait_for_members("receiver.0")
        assert cluster.publisher.client.call("current", deadline_s=60.0).args["number"] == 0
        folder = SHM / cluster.shm_prefix
        assert attack(folder) == [] and folder.stat().st_mode & 0o777 == 0o700
        publisher_client = cluster.publisher_client(token=1)
        assert publisher_client.publish(PolicyVersion(1, 0), model(1))
        assert load(receiver, 0).number == 1
        cluster.publisher.kill()
        cluster.start("publisher.0")
        assert not publisher_client.has_lost(), "the publisher's own legacy is read, in its folder"
    assert all(path.is_symlink() or path.exists() for path in planted), "nothing of his was touched"


def test_the_name_of_a_runs_folder_cannot_be_known_before_it_is_there(run_id: str) -> None:
    with (
        running_cluster(run_id=run_id, services=()) as one,
        running_cluster(run_id=run_id, services=()) as other,
    ):
        assert one.shm_prefix != other.shm_prefix, "it is not made of the run's id alone"


def test_clean_up_of_an_ordinary_user_neither_fails_at_files_of_others_nor_follows_their_links(
    tmp_path: Path, run_id: str
) -> None:
    aside = SHM / f"asyncrl-{run_id}-mine"
    planted = plant(aside, run_id)
    with acting_as(SOMEBODY):
        make_private(aside)
        (aside / "receiver.0-t1-1-1").touch()
        semaphore = SHM / f"sem.asyncrl-{run_id}-receiver.0-mine"
        semaphore.touch()
        assert shared_memory_of(run_id) == [aside, semaphore]
        remove_segments(run_id, "receiver.0")
        assert not semaphore.exists() and list(aside.iterdir()) == []
        (aside / "receiver.0-a").touch()
        found, _ = check_leftovers()
        assert f"*asyncrl-{run_id}-*" in found.found
        assert remove_leftovers(run_id, SHM / f"asyncrl-{run_id}-0") == ["receiver.0-a"]
        assert shared_memory_of(run_id) == []
        found, _ = check_leftovers()
        assert run_id not in found.found, "what others have left is theirs"
    assert all(path.is_symlink() or path.exists() for path in planted)


def test_a_link_of_another_user_leads_clean_up_nowhere(tmp_path: Path, run_id: str) -> None:
    keepsake = tmp_path / "receiver.0-t1-1-1"
    keepsake.touch()
    plant(tmp_path, run_id)
    remove_segments(run_id, "receiver.0")
    remove_leftovers(run_id, SHM / f"asyncrl-{run_id}-1")
    assert keepsake.exists()


@pytest.mark.parametrize("kind", ["folder", "link", "file"])
def test_what_another_user_has_made_is_refused_by_name(tmp_path: Path, run_id: str, kind: str) -> None:
    place, target = SHM / f"asyncrl-{run_id}-0", SHM / f"asyncrl-{run_id}-mine"
    make_private(target)
    with acting_as(NOBODY):
        if kind == "folder":
            place.mkdir(mode=0o700)
        elif kind == "link":
            place.symlink_to(target)
        else:
            place.touch(0o600)
    with pytest.raises(ConfigError, match=f"{place} is no folder private to this user"):
        make_private(place)
