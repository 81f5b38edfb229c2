"""Prompts from files: the forms that are read, what is refused, and how they are numbered."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from asyncrl.core.errors import DataError
from rollout_service.data.gsm8k import INSTRUCTION, convert_gsm8k
from rollout_service.data.readers import digest_of
from rollout_service.tasks.digit_sort.vocabulary import BOS, EQUALS, build_tokenizer
from tests.rollout.data.files import load_prompts, read_prompts

CHAT = [{"role": "user", "content": "12"}, {"role": "assistant", "content": "="}]


def write_jsonl(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_verls_parquet_columns_are_read(tmp_path: Path):
    row = {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": "How many?"}],
        "reward_model": {"style": "rule", "ground_truth": "18"},
        "extra_info": {"index": 3},
    }
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "a.parquet")
    (prompt,) = read_prompts(tmp_path / "a.parquet")
    assert prompt.content == ({"role": "user", "content": "How many?"},)
    assert (prompt.ground_truth, prompt.data_source, prompt.extra_info) == (
        "18",
        "openai/gsm8k",
        {"index": 3},
    )


def test_jsonl_prompts_are_strings_or_chats(tmp_path: Path):
    path = write_jsonl(
        tmp_path / "a.jsonl", {"prompt": "1=", "ground_truth": "1"}, {"prompt": CHAT, "ground_truth": 2}
    )
    first, second = read_prompts(path)
    assert (first.content, first.ground_truth) == ("1=", "1")
    assert (len(second.content), second.ground_truth, second.row) == (2, 2, 1)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"ground_truth": 1}, "row 1: no 'prompt'"),
        ({"prompt": "x"}, "row 1: no 'reward_model.ground_truth'"),
        ({"prompt": "", "ground_truth": 1}, "row 1: 'prompt' must be"),
        ({"prompt": [{"role": "user"}], "ground_truth": 1}, "row 1: a message"),
        ({"prompt": "x", "ground_truth": 1, "extra_info": 3}, "row 1: 'extra_info'"),
        ({"question": "q", "answer": "a"}, "row 1: this is GSM8K's own form"),
        ([1], "row 1: a row must be an object"),
    ],
)
def test_a_row_that_cannot_be_used_is_named_with_its_file(tmp_path: Path, row: Any, message: str):
    path = write_jsonl(tmp_path / "a.jsonl", {"prompt": "x", "ground_truth": 1}, row)
    with pytest.raises(DataError, match=r"a\.jsonl") as caught:
        read_prompts(path)
    assert message in str(caught.value)


def test_broken_json_is_named_with_its_row_and_column(tmp_path: Path):
    (tmp_path / "a.jsonl").write_text('{"prompt": "x", "ground_truth": 1}\n{"prompt": 5\n')
    with pytest.raises(DataError, match=r"row 1: not JSON: .* at column 13"):
        read_prompts(tmp_path / "a.jsonl")


@pytest.mark.parametrize("key", ["prompt", "ground_truth", "data_source"])
def test_half_of_a_surrogate_pair_is_named_with_its_row(tmp_path: Path, key: str):
    row = {"prompt": "\U0001f600", "ground_truth": "\\ud83d", "data_source": ""}  # a whole pair is text
    (first, _) = read_prompts(write_jsonl(tmp_path / "a.jsonl", row, row))
    assert (first.content, first.ground_truth) == ("\U0001f600", "\\ud83d")
    path = write_jsonl(tmp_path / "a.jsonl", row, {**row, key: "cut \ud83d"})
    with pytest.raises(DataError, match=r"row 1: half of a surrogate pair \('\\ud83d'\) is no text"):
        read_prompts(path)


def test_what_is_not_utf8_is_named_with_its_row_however_far_it_stands(tmp_path: Path):
    row = b'{"prompt": "x", "ground_truth": 1}\n'
    (tmp_path / "a.jsonl").write_bytes(row * 1000 + row.replace(b"x", b"\xff"))
    with pytest.raises(DataError, match="row 1000: not UTF-8 at byte 12"):
        read_prompts(tmp_path / "a.jsonl")


@pytest.mark.parametrize("name", ["absent.jsonl", "a.csv", "empty.jsonl", "broken.parquet"])
def test_a_file_that_cannot_be_used_is_a_data_error(tmp_path: Path, name: str):
    (tmp_path / "a.csv").write_text("prompt\n")
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "broken.parquet").write_text("PAR1")
    with pytest.raises(DataError, match=name):
        load_prompts(tmp_path / name, build_tokenizer(), 16)


def test_prompts_over_the_limit_are_left_out_and_the_others_are_numbered_in_order(tmp_path: Path):
    rows = [{"prompt": "1" * length + "=", "ground_truth": ""} for length in (2, 9, 3, 9, 4)]
    prompts = load_prompts(write_jsonl(tmp_path / "a.jsonl", *rows), build_tokenizer(), 6)
    assert [(one.index, one.prompt.row) for one in prompts.prompts] == [(0, 0), (1, 2), (2, 4)]
    assert prompts.at(1).token_ids.tolist() == [BOS, 1, 1, 1, EQUALS]
    for index in (-1, 3):
        with pytest.raises(DataError, match="no prompt"):
            prompts.at(index)


def test_no_prompt_that_fits_is_a_data_error(tmp_path: Path):
    with pytest.raises(DataError, match="fits"):
        load_prompts(
            write_jsonl(tmp_path / "a.jsonl", {"prompt": "123=", "ground_truth": 1}), build_tokenizer(), 2
        )


def test_a_chat_goes_through_the_chat_template(tmp_path: Path):
    path = write_jsonl(tmp_path / "a.jsonl", {"prompt": CHAT, "ground_truth": 1})
    tokenizer = build_tokenizer()
    with pytest.raises(DataError, match="no chat template"):
        load_prompts(path, tokenizer, 16)
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    assert load_prompts(path, tokenizer, 16).at(0).token_ids.tolist()[-3:] == [1, 2, EQUALS]


def test_the_digest_is_that_of_the_content(tmp_path: Path):
    one = write_jsonl(tmp_path / "a.jsonl", {"prompt": "1", "ground_truth": 1})
    same = write_jsonl(tmp_path / "b.jsonl", {"prompt": "1", "ground_truth": 1})
    other = write_jsonl(tmp_path / "c.jsonl", {"prompt": "2", "ground_truth": 1})
    assert digest_of(one) == digest_of(same) != digest_of(other)


def test_gsm8k_is_converted_to_verls_columns(tmp_path: Path):
    rows = [{"question": f"How many {i}?", "answer": f"Well.\n#### 1,{i}00"} for i in range(3)]
    assert (
        convert_gsm8k(write_jsonl(tmp_path / "train.jsonl", *rows), tmp_path / "out" / "a.parquet", limit=2)
        == 2
    )
    first, second = read_prompts(tmp_path / "out" / "a.parquet")
    assert first.content == ({"role": "user", "content": f"How many 0? {INSTRUCTION}"},)
    assert (second.ground_truth, second.data_source) == ("1100", "openai/gsm8k")


def test_gsm8k_without_a_marked_answer_is_refused_with_its_row(tmp_path: Path):
    path = write_jsonl(tmp_path / "train.jsonl", {"question": "q", "answer": "18"})
    with pytest.raises(DataError, match="row 0"):
        convert_gsm8k(path, tmp_path / "a.parquet")
    assert not (tmp_path / "a.parquet").exists()
