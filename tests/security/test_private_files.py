"""Files that hold a secret: this user alone can read them, whatever the umask and whatever lay there."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from unittest import mock

import pytest

from asyncrl.buffer.journals.redis.server import RedisServer
from asyncrl.cli.run import start as run
from asyncrl.control.record.rundir import write_json
from asyncrl.core.config.tree import Config
from asyncrl.core.files.private import keep_others_out
from asyncrl.core.sockets.keys import make_run_keys, write_client_keys
from rollout_service.engine.vllm.environment import prepare_environment


@pytest.fixture(params=[0o000, 0o002, 0o077])
def hostile_umask(request: pytest.FixtureRequest) -> Iterator[int]:
    """A process's umask that would let everybody read and write, and two that would not."""
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def write_keys(path: Path) -> None:
    write_client_keys(path, make_run_keys().client)


def write_live(path: Path) -> None:
    write_json(path, {"key": "secret"}, mode=0o600)


@pytest.mark.parametrize("write", [write_keys, write_live])
@pytest.mark.parametrize("was_there", [False, True])
@pytest.mark.usefixtures("hostile_umask")
def test_a_file_with_a_key_is_this_users_alone(
    tmp_path: Path, write: Callable[[Path], None], was_there: bool
) -> None:
    path = tmp_path / "run.json"
    if was_there:  # what an earlier process left, open to all
        for old in (path, path.with_name(f".{path.name}.{os.getpid()}.{threading.get_native_id()}")):
            old.write_text("{}")
            old.chmod(0o666)
    write(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [entry.name for entry in tmp_path.iterdir()] == ["run.json"]


@pytest.mark.parametrize("may_read", [False, True])
def test_nobody_else_can_open_what_a_run_makes(tmp_path: Path, hostile_umask: int, may_read: bool) -> None:
    keep_others_out(may_read=may_read)
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "file").write_text("")
    for path in (tmp_path / "made", tmp_path / "made" / "file"):
        assert not stat.S_IMODE(path.stat().st_mode) & ((0o022 if may_read else 0o077) | hostile_umask)


@pytest.mark.parametrize("prepare", [keep_others_out, partial(prepare_environment, has_gpu=False)])
def test_compiled_code_is_read_from_no_folder_that_others_could_have_made(
    tmp_path: Path, prepare: Callable[[], None]
) -> None:
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    with mock.patch.dict(os.environ, {"HOME": str(tmp_path), "TMPDIR": "/tmp"}, clear=True):
        prepare()
        assert Path(cache_dir()).is_relative_to(tmp_path)


class Stopped(Exception):
    """Right before the head would be started."""


def start(runs: Path) -> Path:
    """Start a run below `runs` up to where its head would be; return its folder."""

    def stop() -> None:
        (runs / "a" / "file").touch()
        raise Stopped

    builtin = "builtin:digit_sort"
    sections = {"model": {"path": builtin}, "data": {"train": builtin}, "reward": {"fn": "digit_sort"}}
    sections["rollout"] = {"max_tokens": 16}
    with pytest.raises(Stopped):
        run.start(Config(**sections, run={"name": "a", "dir": str(runs)}), before=stop)
    return runs / "a"


def modes_of(*paths: Path) -> list[str]:
    return [oct(stat.S_IMODE(path.stat().st_mode)) for path in paths]


@pytest.mark.usefixtures("hostile_umask")
def test_a_runs_folder_and_those_made_above_it_are_this_users_alone_from_the_first(tmp_path: Path) -> None:
    runs = tmp_path / "project" / "runs"
    folder = start(runs)
    assert modes_of(runs.parent, runs, folder, folder / "logs", folder / "file") == ["0o700"] * 4 + ["0o600"]
    made = [path for path in runs.rglob("*") if not path.is_relative_to(folder)]
    assert made, "the built-in model"
    assert [path for path in made if path.stat().st_mode & 0o022] == []


@pytest.mark.parametrize("hostile_umask", [0o002], indirect=True)
@pytest.mark.usefixtures("hostile_umask")
def test_a_runs_folder_that_is_there_already_keeps_its_mode(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "a"
    folder.mkdir(parents=True)
    folder.chmod(0o750)
    assert modes_of(folder.parent, start(folder.parent), folder / "logs") == ["0o775", "0o750", "0o700"]


@pytest.mark.parametrize("hostile_umask", [0], indirect=True)
@pytest.mark.usefixtures("hostile_umask")
def test_a_managed_redis_keeps_its_password_in_a_private_folder(tmp_path: Path) -> None:
    folder = tmp_path / "redis"
    server = RedisServer(folder)
    for name in ("redis.new", "server.new"):
        (folder / name).write_text("")
        (folder / name).chmod(0o666)
    server.ensure()
    try:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        for name in ("redis.conf", "server.json"):
            assert stat.S_IMODE((folder / name).stat().st_mode) == 0o600, name
        assert server.pid is not None
        password = server.url.split(":")[2].split("@")[0]
        assert password not in Path(f"/proc/{server.pid}/cmdline").read_text()
        assert password not in (folder / "redis.conf").read_text()
    finally:
        server.stop()
