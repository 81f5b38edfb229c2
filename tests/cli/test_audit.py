"""`asyncrl inspect` and `asyncrl verify` on journals of real stores, open and closed."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from asyncrl.buffer.composition import ledger_settings
from asyncrl.buffer.journals.kind import open_journal
from asyncrl.buffer.store import ExperienceStore
from asyncrl.cli.app import app
from asyncrl.cli.reports.account import lines_of
from asyncrl.core.config.load import dump_resolved
from asyncrl.core.config.tree import Config
from asyncrl.core.errors import CheckpointError, ConfigError
from asyncrl.core.experience import encode_group
from tests.buffer.parts import GROUP_SIZE, make_group

JOURNALS = [{"journal": "file"}, {"journal": "redis", "url": "managed"}]


def make_config(runs_dir: Path, buffer: dict[str, object]) -> Config:
    return Config.model_validate(
        {
            "run": {"name": "told", "dir": str(runs_dir)},
            "model": {"path": "builtin:digit_sort"},
            "data": {"train": "builtin:digit_sort"},
            "reward": {"fn": "gsm8k"},
            "rollout": {"group_size": GROUP_SIZE, "max_tokens": 32},
            "learner": {"groups_per_step": 2},
            "staleness": {"max_lag": 1},
            "buffer": buffer,
        }
    )


@contextmanager
def opened(config: Config) -> Iterator[ExperienceStore]:
    folder = Path(config.run.dir) / config.run.name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "resolved.yaml").write_text(dump_resolved(config))
    journal = open_journal(config.buffer, folder)
    with closing(journal):
        yield ExperienceStore(ledger_settings(config), journal, GROUP_SIZE, True, now=0.0)


def train_two_steps(store: ExperienceStore) -> None:
    """Two steps, the first with a group that failed once and one whose rewards were all equal."""
    ledger = store.ledger
    ledger.describe_data(100, "digest")
    token = ledger.open("learner")
    version = ledger.register_version(token, 0)
    (first,) = ledger.lease("a", version, 1, 0.0)
    store.fail("a", first.ticket, first.attempt, "reward")
    for step in range(2):
        while (batch := ledger.reserve(token, step, 0.0)) is None:
            (grant,) = ledger.lease("a", version, 1, 0.0)
            rewards = (1.0, 1.0) if grant.ticket == 2 else (0.0, 1.0)
            group = make_group(grant.ticket, grant.attempt, version, rewards)
            store.push("a", grant.ticket, grant.attempt, encode_group(group))
            assert store.commit(0.0)
        assert len(batch) == 2
        ledger.trained(token, step, lag_max=0)
        version = ledger.register_version(token, step + 1)
        assert store.commit(0.0)


def ask(runs_dir: Path, *words: str) -> Result:
    return CliRunner().invoke(app, [*words, "--dir", str(runs_dir)])


@pytest.mark.parametrize("buffer", JOURNALS, ids=["file", "redis"])
def test_a_living_run_and_an_ended_one_are_told_and_verified_alike(tmp_path: Path, buffer: dict[str, object]):
    with opened(make_config(tmp_path, buffer)) as store:
        train_two_steps(store)
        living = [ask(tmp_path, "inspect", "account", "told"), ask(tmp_path, "verify", "told")]
    ended = [ask(tmp_path, "inspect", "account", "told"), ask(tmp_path, "verify", "told")]
    for account, verdict in (living, ended):
        assert account.exit_code == verdict.exit_code == 0, account.output + verdict.output
        assert "residue 0; largest lag trained 0, bound 1; 0 findings" in verdict.stdout
        assert "    zero_variance        1" in account.stdout
    told = json.loads(ask(tmp_path, "inspect", "account", "told", "--json").stdout)
    assert told["account"]["trained"] == 4
    assert told["account"]["residue"] == 0
    assert (told["lag"], told["max_lag"]) == ({"0": 4}, 1)


@pytest.fixture
def runs_dir(tmp_path: Path) -> Path:
    """Holds a run with a file journal that has trained two steps."""
    with opened(make_config(tmp_path, JOURNALS[0])) as store:
        train_two_steps(store)
    return tmp_path


def change_journal(runs_dir: Path, statement: str, *values: object) -> list[tuple[bytes]]:
    path = runs_dir / "told" / "buffer" / "events.sqlite"
    with closing(sqlite3.connect(path)) as database, database:
        return database.execute(statement, values).fetchall()


def test_the_life_of_a_ticket_is_printed_with_times(runs_dir: Path):
    lines = ask(runs_dir, "inspect", "ticket", "told", "1").stdout.splitlines()
    assert lines[0][:2] == "20"
    assert [line[24:].split(":")[0].split(",")[0].strip() for line in lines] == [
        "issued",
        "attempt 1 leased to a at position 0",
        "issued again (failed)",
        "attempt 2 leased to a at position 0",
        "stored",
        "reserved for step 0",
        "trained at step 0",
    ]
    moments = json.loads(ask(runs_dir, "inspect", "ticket", "told", "1", "--json").stdout)
    assert len(moments) == len(lines)
    unknown = ask(runs_dir, "inspect", "ticket", "told", "99")
    assert isinstance(unknown.exception, ConfigError)


def test_of_a_ticket_whose_events_are_trimmed_the_snapshot_is_told(tmp_path: Path):
    with opened(make_config(tmp_path, JOURNALS[1])) as store:
        train_two_steps(store)
        store.journal.write_snapshot(store.ledger.state.as_snapshot())
        token = store.ledger.open("successor")
        store.ledger.resume(token, 0)
        assert store.commit(0.0)
        lines = ask(tmp_path, "inspect", "ticket", "told", "1").stdout.splitlines()
        unknown = ask(tmp_path, "inspect", "ticket", "told", "99")
    assert [line.split(maxsplit=1)[0] for line in lines] == ["-", lines[1].split()[0]]
    assert "in the snapshot that the journal begins with: trained (step 0), attempt 2, 16 tokens" in lines[0]
    assert lines[1].endswith("reserved for step 0 again: the learner resumed at step 0")
    assert isinstance(unknown.exception, ConfigError)


def test_a_commit_that_vanished_from_the_journal_fails_the_verification_loudly(runs_dir: Path):
    change_journal(runs_dir, "DELETE FROM turns WHERE id = 3")
    verdict = ask(runs_dir, "verify", "told")
    assert verdict.exit_code == 1
    assert verdict.stdout.startswith("S1: ")
    assert "breaks S1" in verdict.stderr


def test_a_commit_that_was_altered_is_named(runs_dir: Path):
    ((data,),) = change_journal(runs_dir, "SELECT data FROM turns WHERE id = 3")
    change_journal(runs_dir, "UPDATE turns SET data = ? WHERE id = 3", data[:-1] + bytes([data[-1] ^ 1]))
    found = ask(runs_dir, "verify", "told").exception
    assert isinstance(found, CheckpointError)
    assert "commit 3" in str(found)


def test_a_run_that_keeps_no_journal_and_one_that_is_not_there_are_said(tmp_path: Path):
    with opened(make_config(tmp_path, {"journal": "none"})):
        pass
    assert "keeps no journal" in str(ask(tmp_path, "verify", "told").exception)
    assert "no run 'other'" in str(ask(tmp_path, "verify", "other").exception)


def test_a_lag_over_the_bound_is_said_to_be_of_masked_tokens() -> None:
    text = "\n".join(lines_of({"max_lag": 4, "lag": {0: 900, 4: 80, 5: 76}, "events": 7}))
    assert "lag of the oldest token of each trained group (max_lag 4)" in text
    rows = dict(line.strip().rsplit(" ", 1) for line in text.splitlines() if line.startswith("  "))
    assert {name.strip(): count for name, count in rows.items()} == {
        "0": "900",
        "4": "80",
        "5 (over max_lag: masked)": "76",
    }
