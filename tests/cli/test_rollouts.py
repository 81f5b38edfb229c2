"""`asyncrl inspect rollouts` on journals of real stores: answers token by token, masks, drops, pages."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from asyncrl.buffer.ledger.state import LedgerState
from asyncrl.buffer.store import ExperienceStore
from asyncrl.cli.app import app
from asyncrl.cli.rollouts.fates import Fate, FateBook
from asyncrl.cli.rollouts.pieces import token_texts
from asyncrl.core.errors import ConfigError
from asyncrl.core.experience import Group, Trajectory, encode_group
from asyncrl.core.files.printable import printable
from asyncrl.core.staleness import Span
from rollout_service.tasks.tiny_text import build_tokenizer
from tests.buffer.ledger.parts.ledger_runs import SETTINGS
from tests.cli.test_audit import JOURNALS, make_config, opened

EVIL = "<script>alert(1)</script>"
GOOD, BAD = "sum: 3 é", "\x1b[2J" + EVIL


@pytest.fixture
def tokenizer(tmp_path: Path):
    made = build_tokenizer()
    made.save_pretrained(tmp_path / "model")
    return made


def make_trajectory(tokenizer, text: str, spans: tuple[Span, ...], reward: float) -> Trajectory:
    ids = np.asarray(tokenizer(text)["input_ids"], dtype=np.int32)
    *earlier, last = spans
    return Trajectory(
        response_ids=ids,
        loss_mask=np.ones(len(ids), np.uint8),
        logprobs=np.linspace(0.0, -9.0, len(ids)).astype(np.float32),
        spans=(*earlier, replace(last, end=len(ids))),
        reward=reward,
        finish_reason="stop",
        reward_parts={"gsm8k": reward, "format": 0.5},
    )


def push(store: ExperienceStore, tokenizer, rewards: tuple[float, float], spans: tuple[Span, ...]) -> int:
    """Push a group of one good and one bad answer to an evil prompt; return its ticket."""
    (grant,) = store.ledger.lease("a", store.ledger.state.versions.last_number, 1, 0.0)
    prompt = np.asarray(tokenizer(EVIL)["input_ids"], dtype=np.int32)
    good, bad = (
        make_trajectory(tokenizer, text, spans, reward)
        for text, reward in zip((GOOD, BAD), rewards, strict=True)
    )
    good.loss_mask[4:6] = 0
    good.logprobs[4:6] = 0.0
    group = Group(grant.ticket, grant.attempt, prompt, (replace(good, num_turns=2), bad))
    store.push("a", grant.ticket, grant.attempt, encode_group(group))
    assert store.commit(0.0)
    return grant.ticket


def train_three_steps(store: ExperienceStore, tokenizer) -> None:
    """Three steps under max_lag 1; the last trains tokens of versions 1 to 3, and so of lag 2 to 0."""
    ledger = store.ledger
    ledger.describe_data(100, "digest")
    token = ledger.open("learner")
    for step in range(3):
        ledger.register_version(token, step)
        if step == 2:
            push(store, tokenizer, (1.0, 1.0), (Span(3, 0, 1),))  # dropped: nothing to learn from it
        spans = tuple(Span(version, version - 1, version) for version in range(1, step + 2))
        for reward in (1.0, 2.0):
            push(store, tokenizer, (reward, -reward), spans)
        assert ledger.reserve(token, step, 0.0) is not None
        ledger.trained(token, step, lag_max=min(step, 1))
        assert store.commit(0.0)


def ask(runs_dir: Path, *words: str) -> Result:
    return CliRunner().invoke(app, ["inspect", "rollouts", *words, "--dir", str(runs_dir)])


def make_run(tmp_path: Path, buffer: dict[str, object], model: str = "model"):
    config = make_config(tmp_path, buffer)
    path = str(tmp_path / model)
    return opened(config.model_copy(update={"model": config.model.model_copy(update={"path": path})}))


@pytest.fixture
def runs_dir(tmp_path: Path, tokenizer) -> Iterator[Path]:
    """Holds a living run with a file journal that has trained three steps."""
    with make_run(tmp_path, JOURNALS[0]) as store:
        train_three_steps(store, tokenizer)
        yield tmp_path


@pytest.mark.parametrize("buffer", JOURNALS, ids=["file", "redis"])
def test_a_living_run_and_an_ended_one_show_the_same_answers(tmp_path: Path, tokenizer, buffer):
    with make_run(tmp_path, buffer) as store:
        train_three_steps(store, tokenizer)
        before = store.ledger.state.as_values()
        living = ask(tmp_path, "told", "--json")
        push(store, tokenizer, (0.0, 1.0), (Span(3, 0, 1),))  # the run goes on as if nobody had looked
        assert store.ledger.state.num_issued > before["num_issued"]
    ended = ask(tmp_path, "--json")
    assert living.exit_code == ended.exit_code == 0, living.output + ended.output
    found = json.loads(living.stdout)
    assert json.loads(ended.stdout) == found
    assert (found["title"], found["num_answers"], found["gone"]) == ("step 2", 4, [])
    answer = found["answers"][0]
    assert answer["prompt"] == EVIL
    assert "".join(answer["texts"]) == GOOD
    assert answer["reward_parts"] == {"gsm8k": 1.0, "format": 0.5}
    assert (answer["num_turns"], answer["finish_reason"], answer["group_mean"]) == (2, "stop", 0.0)
    assert [(span["version"], span["lag"]) for span in answer["spans"]] == [(1, 2), (2, 1), (3, 0)]


def test_tokens_over_the_bound_and_observations_are_told_from_trained_ones(runs_dir: Path):
    (first, *_) = json.loads(ask(runs_dir, "told", "--json").stdout)["answers"]
    assert first["masks"][:7] == ["over age", "", "", "", "observation", "observation", ""]
    text = ask(runs_dir, "told").stdout
    spans = ("[v1 lag 2] ⟪s⟫", "[v2 lag 1] u", "[v3 lag 0] m:⟦ 3⟧ é")
    lines = [re.sub(r"\{[0-9.]+\}", "", line).strip() for line in text.splitlines()]
    assert all(span in lines for span in spans), "a version begins a line; without colour nothing else tells"
    assert "3 of 9 tokens not trained: 1 over age, 2 observation" in text
    assert "reward 1 (mean of its group 0) · gsm8k 1, format 0.5 · ended by stop · 2 turns" in text


def test_an_episode_of_several_trajectories_counts_once_in_the_mean_of_its_group(tokenizer):
    fates = FateBook([], LedgerState(SETTINGS), max_lag=1)
    good, bad = (make_trajectory(tokenizer, GOOD, (Span(1, 0, 1),), reward) for reward in (1.0, -1.0))
    group = Group(1, 1, good.response_ids, (good, good, good, bad), forked=(0, 0, 0, 1))
    shown = fates.rollouts_of(Fate(1, 1, "trained", 0), group)
    assert [(one.sample, one.group_mean) for one in shown] == [(0, 0.0)] * 3 + [(1, 0.0)]


def test_worst_and_best_order_by_reward_and_a_limit_cuts(runs_dir: Path):
    def rewards(*words: str) -> list[float]:
        found = json.loads(ask(runs_dir, "told", "--json", *words).stdout)
        return [answer["reward"] for answer in found["answers"]]

    assert rewards() == [1.0, -1.0, 2.0, -2.0]
    assert rewards("--worst") == [-2.0, -1.0, 1.0, 2.0]
    assert rewards("--best", "--limit", "2") == [2.0, 1.0]
    assert "step 0, best first: 1 of 4" in ask(runs_dir, "--step", "0", "--best", "--limit", "1").stdout
    assert ask(runs_dir, "told", "--worst", "--best").exit_code == 2


def test_a_dropped_group_is_shown_with_its_text_and_the_reason(runs_dir: Path):
    text = ask(runs_dir, "told", "--dropped").stdout
    assert "dropped (zero_variance) while step 2 was in the making: all its rewards were equal" in text
    plain = re.sub(r"\{[0-9.]+\}", "", text)
    assert EVIL in text and "sum:⟦ 3⟧ é" in plain
    elsewhere = json.loads(ask(runs_dir, "told", "--dropped", "--step", "1", "--json").stdout)
    assert elsewhere["num_answers"] == 0 and elsewhere["gone"] == []
    assert "no group was dropped there" in ask(runs_dir, "told", "--dropped", "--step", "1").stderr


def drop(store: ExperienceStore, tokenizer, num_groups: int) -> None:
    for _ in range(num_groups):
        push(store, tokenizer, (1.0, 1.0), (Span(3, 0, 1),))


@pytest.mark.parametrize("buffer", JOURNALS, ids=["file", "redis"])
def test_the_newest_dropped_groups_keep_their_text_also_through_a_restart(
    tmp_path: Path, tokenizer, buffer, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("asyncrl.buffer.store.MAX_KEPT_DROPPED", 3)
    with make_run(tmp_path, buffer) as store:
        train_three_steps(store, tokenizer)  # ticket 5 is dropped
        state, ledger = store.ledger.state, store.ledger
        drop(store, tokenizer, 2)
        ledger.open("learner")
        ledger.resume(state.token, 0)
        ledger.trained(state.token, 0, lag_max=0)
        ledger.trained(state.token, 1, lag_max=1)
        refused = state.by_step[2][0].id
        ledger.trained(state.token, 2, [(refused, "guard")], lag_max=1)
        ledger.register_version(state.token, 3)  # no lease goes to weights that the resume abandoned
        assert store.commit(0.0)
        kept = [number for number in state.tickets if store.journal.holds(number, 1)]
        assert [number for number in kept if state.tickets[number].reason] == [refused, 8, 9]
    with make_run(tmp_path, buffer) as store:
        drop(store, tokenizer, 1)
        found = json.loads(ask(tmp_path, "told", "--dropped", "--json").stdout)
        assert not store.journal.holds(8, 1) and store.journal.holds(10, 1)
    reasons = {answer["ticket"]: answer["reason"] for answer in found["answers"]}
    assert reasons[refused] == "guard" and reasons[9] == reasons[10] == "zero_variance"
    if buffer["journal"] == "redis":  # a file keeps more, because it is deleted whole
        assert [fate["ticket"] for fate in found["gone"]] == [8, 5]


def test_what_a_model_wrote_cannot_steer_the_terminal(runs_dir: Path):
    text = ask(runs_dir, "told", "--worst", "--limit", "1").stdout
    assert "\x1b" not in text
    assert "\\x1b" in text.replace("⟪", "").replace("⟫", "")
    assert printable("a\u202eb\r") == "a\\u202eb\\r"
    assert printable("é 漢 字\n") == "é 漢 字\n"


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.attributes: set[str] = set()

    def handle_starttag(self, tag, attrs):
        self.names.add(tag)
        self.attributes |= {name for name, _ in attrs}


def test_the_page_is_one_file_in_which_no_text_becomes_markup(runs_dir: Path):
    printed = ask(runs_dir, "told", "--html").stdout.strip()
    page = Path(printed).read_text()
    assert Path(printed).parent == runs_dir / "told" / "rollouts"
    tags = Tags()
    tags.feed(page)
    assert "script" not in tags.names and "&lt;script&gt;" in page
    assert '">&lt;</i>' in page and "><</i>" not in page
    assert not tags.attributes & {"src", "href", "onclick", "onerror"} and "url(" not in page
    assert tags.names >= {"style", "section", "pre", "i", "b"}
    assert "prefers-color-scheme: dark" in page and "width=device-width" in page
    assert '<i class="age" title="-0.000, over age">s</i>' in page.replace('title="0.000', 'title="-0.000')
    assert "<b>v3 lag 0</b>" in page


def test_letters_of_several_tokens_stand_at_their_last_one(tokenizer):
    ids = tokenizer("é漢!")["input_ids"]
    texts = token_texts(ids, lambda some: tokenizer.decode(some))
    assert texts == ["", "é", "", "", "漢", "!"]
    words = ["to", "be", "or"]
    assert token_texts([0, 1, 2], lambda some: " ".join(words[one] for one in some)) == ["to", " be", " or"]
    assert token_texts(ids[:1], lambda some: tokenizer.decode(some)) == ["\ufffd"]
    assert "".join(token_texts([5] * 40, lambda some: "\ufffd" * len(some))) == "\ufffd" * 40


def test_steps_runs_and_tokenizers_that_are_not_there_are_said(runs_dir: Path, tmp_path: Path):
    missing = ask(runs_dir, "told", "--step", "9").exception
    assert isinstance(missing, ConfigError) and "no group of step 9" in str(missing)
    assert "no run 'other'" in str(ask(runs_dir, "other").exception)
    with make_run(tmp_path / "second", {"journal": "none"}):
        pass
    assert "keeps no journal" in str(ask(tmp_path / "second", "told").exception)
    with make_run(tmp_path / "third", JOURNALS[0], model="nothing") as store:
        assert "no step was trained yet" in str(ask(tmp_path / "third").exception)
        train_three_steps(store, build_tokenizer())
        found = ask(tmp_path / "third", "--json")
    assert "token ids are shown" in found.stderr
    assert json.loads(found.stdout)["answers"][0]["texts"][0].startswith("<")


def test_a_step_whose_payloads_were_let_go_says_so(tmp_path: Path, tokenizer):
    with make_run(tmp_path, JOURNALS[1]) as store:
        train_three_steps(store, tokenizer)
        store.ledger.checkpointed(store.ledger.state.token, 3, "digest", [3])
        assert store.commit(0.0)
        store.journal.tick(0.0)
        found = ask(tmp_path, "told")
    assert found.exit_code == 0
    assert "trained at step 2, its text is not kept any more" in found.stdout
    assert "no text of these groups" in found.stderr


def test_a_file_that_is_being_written_or_was_just_deleted_hides_no_other_payload(runs_dir: Path):
    payloads = runs_dir / "told" / "buffer" / "payloads"
    (newest,) = payloads.glob("*.segment")
    whole = json.loads(ask(runs_dir, "told", "--json").stdout)
    (payloads / "99999999.segment").symlink_to(payloads / "gone")
    size = newest.stat().st_size
    with newest.open("ab") as file:
        file.write(newest.read_bytes()[:100])
    assert json.loads(ask(runs_dir, "told", "--json").stdout) == whole
    assert newest.stat().st_size == size + 100, "nothing was cut"
    with newest.open("r+b") as file:
        file.seek(size - 1)
        file.write(b"\x00")
    damaged = json.loads(ask(runs_dir, "told", "--json").stdout)
    assert [fate["ticket"] for fate in damaged["gone"]] == [7]
    assert damaged["answers"] == whole["answers"][:2]
