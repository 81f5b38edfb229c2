"""Sources of prompts: the kinds that are read, filters, mixing, curricula, and the digest of it all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from asyncrl.buffer.ledger.orders import PromptOrder, Source
from asyncrl.core.config.tree import SourceSection
from asyncrl.core.errors import ConfigError, DataError
from rollout_service.data.prompts import PromptSet
from rollout_service.data.sources import load_sources
from rollout_service.rewards.calling import FunctionReward
from rollout_service.rewards.rules.matching import score_digit_sort
from rollout_service.tasks.digit_sort.vocabulary import build_tokenizer
from tests.rollout.data.files import load_prompts, read_prompts
from tests.rollout.replica.replica_parts import WAIT_S, open_stage

LIMIT = 12
FUNCTIONS = """
def is_odd(row):
    return int(row["ground_truth"]) % 2 == 1

def hardness(row):
    return -int(row["ground_truth"])

def nothing(row):
    return None

def breaks(row):
    raise KeyError("level")

not_callable = 3
"""


def rows_of(*texts: str, **fields: Any) -> list[dict[str, Any]]:
    return [{"prompt": f"{text}=", "ground_truth": text, **fields} for text in texts]


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def write_split(folder: Path, *parts: list[dict[str, Any]], **state: Any) -> str:
    """Write what `save_to_disk` of the datasets library writes for one split."""
    folder.mkdir(parents=True)
    names = [f"data-{number:05}-of-{len(parts):05}.arrow" for number in range(len(parts))]
    for name, rows in zip(names, parts, strict=True):
        table = pa.Table.from_pylist(rows)
        with pa.OSFile(str(folder / name), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as stream:
            stream.write_table(table, max_chunksize=2)
    told = {"_data_files": [{"filename": name} for name in names], "_split": "train", **state}
    (folder / "state.json").write_text(json.dumps(told))
    (folder / "dataset_info.json").write_text("{}")
    return str(folder)


def load(*sources: dict[str, Any], curriculum: str | None = None) -> PromptSet:
    sections = [SourceSection(**source) for source in sources]
    return load_sources(sections, build_tokenizer(), LIMIT, curriculum)


def truths(prompts: PromptSet) -> list[str]:
    return [one.prompt.ground_truth for one in prompts.prompts]


@pytest.fixture
def functions(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    return str(tmp_path / "mine.py")


def test_a_folder_of_the_datasets_library_is_read_over_all_its_files(tmp_path: Path):
    chat = [{"role": "user", "content": "1"}]
    folder = write_split(
        tmp_path / "saved", rows_of("1", "2", "3"), rows_of("4"), [{"prompt": chat, "ground_truth": "5"}]
    )
    prompts = read_prompts(Path(folder))
    assert [one.ground_truth for one in prompts] == ["1", "2", "3", "4", "5"]
    assert prompts[4].content == tuple(chat)


def test_a_split_of_a_folder_is_named_by_its_path(tmp_path: Path):
    write_split(tmp_path / "saved" / "train", rows_of("1"))
    write_split(tmp_path / "saved" / "test", rows_of("2"))
    (tmp_path / "saved" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert truths(load_prompts(tmp_path / "saved" / "test", build_tokenizer(), LIMIT)) == ["2"]
    with pytest.raises(DataError, match="holds the splits test, train") as caught:
        read_prompts(tmp_path / "saved")
    assert str(tmp_path / "saved" / "test") in caught.value.hint


def test_a_folder_that_cannot_be_read_is_told_with_its_reason(tmp_path: Path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="not a folder of the datasets library"):
        read_prompts(tmp_path / "empty")
    selected = write_split(tmp_path / "selected", rows_of("1"), _indices_data_files=[{"filename": "i"}])
    with pytest.raises(DataError, match="a selection of rows"):
        read_prompts(Path(selected))
    broken = Path(write_split(tmp_path / "broken", rows_of("1"), rows_of("2")))
    (broken / "data-00000-of-00002.arrow").write_bytes(b"not arrow")
    with pytest.raises(DataError, match="not a readable Arrow stream"):
        read_prompts(broken)
    (broken / "data-00000-of-00002.arrow").unlink()
    with pytest.raises(DataError, match="lacks data-00000-of-00002"):
        read_prompts(broken)


@pytest.mark.parametrize("name", ["../a.arrow", "/a.arrow", "a/b.arrow", "..", "", "."])
def test_a_folder_names_no_file_outside_of_it(tmp_path: Path, name: str):
    folder = Path(write_split(tmp_path / "split", rows_of("1"), _data_files=[{"filename": name}]))
    with pytest.raises(DataError, match="is not a file name in it"):
        read_prompts(folder)


def test_sources_are_numbered_one_after_the_other_and_know_their_weights(tmp_path: Path):
    first = write_jsonl(tmp_path / "sums.jsonl", rows_of("1", "2"))
    second = write_jsonl(tmp_path / "named.jsonl", rows_of("3", data_source="openai/gsm8k"))
    prompts = load({"path": first, "weight": 2.0}, {"path": second})
    assert [one.index for one in prompts.prompts] == [0, 1, 2]
    assert prompts.sources == ((2, 2.0), (1, 1.0))
    assert [one.prompt.data_source for one in prompts.prompts] == ["sums", "sums", "openai/gsm8k"]
    assert [one.prompt.ground_truth for one in prompts.first_of_each(1)] == ["1", "3"]
    alone = load({"path": first, "weight": 2.0})
    assert alone.sources == ()
    assert [one.prompt.data_source for one in alone.prompts] == ["", ""]
    assert [one.index for one in alone.first_of_each(9)] == [0, 1]


def test_filters_leave_out_by_function_by_length_and_what_came_before(tmp_path: Path, functions: str):
    path = write_jsonl(tmp_path / "a.jsonl", rows_of("1", "2", "3", "3", "4444", "55555", "7777777"))
    assert truths(load({"path": path, "filter": "unique"})) == ["1", "2", "3", "4444", "55555", "7777777"]
    assert truths(load({"path": path, "filter": f"{functions}:is_odd"})) == [
        "1",
        "3",
        "3",
        "55555",
        "7777777",
    ]
    assert truths(load({"path": path, "filter": "tokens:5:7"})) == ["4444", "55555"]
    assert truths(load({"path": path, "filter": "tokens::4"})) == ["1", "2", "3", "3"]
    both = ["unique", f"{functions}:is_odd", "tokens::8"]
    assert truths(load({"path": path, "filter": both})) == ["1", "3", "55555"]


def test_equal_prompts_are_found_within_one_source_only(tmp_path: Path):
    path = write_jsonl(tmp_path / "a.jsonl", rows_of("1", "1"))
    assert load({"path": path, "filter": "unique"}, {"path": path, "filter": "unique"}).num_prompts == 2


def test_a_curriculum_numbers_each_source_from_easy_to_hard(tmp_path: Path, functions: str):
    path = write_jsonl(tmp_path / "a.jsonl", rows_of("1", "3", "2"))
    other = write_jsonl(tmp_path / "b.jsonl", rows_of("4", "5"))
    found = load({"path": path}, {"path": other}, curriculum=f"{functions}:hardness")
    assert truths(found) == ["3", "2", "1", "5", "4"]
    assert [one.index for one in found.prompts] == [0, 1, 2, 3, 4]
    rows = [
        {**row, "extra_info": {"level": level}}
        for row, level in zip(rows_of("1", "2", "3"), ("Level 2", "Level 1", "Level 2"), strict=True)
    ]
    found = load({"path": write_jsonl(tmp_path / "c.jsonl", rows)}, curriculum="extra_info.level")
    assert truths(found) == ["2", "1", "3"], "equal ones stay in their order"


@pytest.mark.parametrize(
    ("curriculum", "message"),
    [("extra_info.level", "row 0: the key 'extra_info.level' is None"), ("mine.py:nothing", "is None")],
)
def test_a_row_without_a_key_is_named(tmp_path: Path, functions: str, curriculum: str, message: str):
    path = write_jsonl(tmp_path / "a.jsonl", rows_of("1"))
    with pytest.raises(DataError, match=message.replace(".", r"\.")):
        load({"path": path}, curriculum=curriculum.replace("mine.py", functions))


def test_keys_of_two_kinds_are_refused(tmp_path: Path):
    rows = rows_of("1", level=3) + rows_of("2", level="hard")
    with pytest.raises(DataError, match="numbers and texts"):
        load({"path": write_jsonl(tmp_path / "a.jsonl", rows)}, curriculum="level")


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("mine.py:breaks", DataError, "row 0: .*mine.py:breaks raised KeyError"),
        ("mine.py:absent", ConfigError, "no function 'absent'"),
        ("mine.py:not_callable", ConfigError, "no function 'not_callable'"),
        ("absent.py:keep", ConfigError, "does not exist"),
        ("long", ConfigError, "there is no filter 'long'"),
        ("mine.py:nothing", DataError, "1 left out by filters"),
        ("tokens:9:", DataError, "by their length"),
    ],
)
def test_a_filter_that_cannot_be_used_is_told(
    tmp_path: Path, functions: str, name: str, error: type[Exception], message: str
):
    path = write_jsonl(tmp_path / "a.jsonl", rows_of("1"))
    with pytest.raises(error, match=message):
        load({"path": path, "filter": name.replace("mine.py", functions)})


def test_the_digest_tells_every_change_of_what_is_drawn(tmp_path: Path, functions: str):
    path = write_jsonl(tmp_path / "a.jsonl", rows_of("1", "2", "3"))
    other = write_jsonl(tmp_path / "b.jsonl", rows_of("4"))
    folder = write_split(tmp_path / "saved", rows_of("1", "2", "3"))
    sets = [
        load({"path": path}),
        load({"path": path, "filter": f"{functions}:is_odd"}),
        load({"path": path}, curriculum="ground_truth"),
        load({"path": path}, curriculum=f"{functions}:hardness"),
        load({"path": path}, {"path": other}),
        load({"path": other}, {"path": path}),
        load({"path": folder}),
    ]
    assert len({one.digest for one in sets}) == len(sets)
    assert load({"path": path}).digest == sets[0].digest


def test_a_replica_generates_the_mix_in_the_ledger_s_order(tmp_path: Path):
    other = write_jsonl(tmp_path / "other.jsonl", rows_of("111", "222", "333"))
    sources = [SourceSection(path=other, weight=2.0)]
    reward = FunctionReward("digit_sort", score_digit_sort)
    with open_stage(tmp_path, reward, sources=sources) as stage:
        stage.serve_first_version()
        reservation = stage.learner.reserve(0, WAIT_S)
        assert reservation is not None
        order = PromptOrder(0, (Source(50), Source(3, 2.0)), is_shuffled=True)
        for group in stage.learner.fetch([one.ticket for one in reservation.tickets]):
            drawn = order.at(group.ticket - 1)
            assert group.prompt_ids.tolist() == stage.prompts.at(drawn.row).token_ids.tolist()
