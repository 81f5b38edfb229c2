"""`docs/benchmarks.md` is made of the stored rows and the texts beside them."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from asyncrl.cli.commands.bench import BENCHMARKS
from asyncrl.core.errors import DataError
from benchmarks.harness.rows import Row, RowFile
from benchmarks.reports.page import NOT_OF_ROWS, RESULTS, caption, parse_directive, render, show, table

PAGE = Path(__file__).parents[3] / "docs" / "benchmarks.md"
ROWS = [
    Row.of("pipeline", {"max_lag": 0, "engine": "real"}, {"step_s": [0.3, 0.5], "idle": 0.5}),
    Row.of("pipeline", {"max_lag": 4, "engine": "real"}, {"step_s": 0.2, "tokens": 12345.6}),
    Row.of("other", {"size": 1}, {"us": 1.0}),
]


def store(folder: Path, text: str, *names: str) -> Path:
    (folder / "texts").mkdir()
    (folder / "texts" / "10-a.md").write_text(f"# Page\n\n{text}\n")
    for name in names:
        RowFile.taken_here("pipeline --quick", ROWS).write(folder / name)
    return folder


def test_the_page_is_current():
    command = "python -m benchmarks.reports.page > docs/benchmarks.md"
    assert PAGE.read_text(encoding="utf-8") == render(), command


def test_every_stored_file_is_of_rows_or_known_not_to_be():
    for path in RESULTS.glob("*.json"):
        assert path.name in NOT_OF_ROWS or RowFile.read(path).rows, path.name
    assert all((RESULTS / name).is_file() for name in NOT_OF_ROWS)


def test_a_line_in_a_text_becomes_the_table_of_its_rows(tmp_path: Path):
    line = "<!-- rows: a.json | bench: pipeline | case: max_lag | values: step_s, tokens -->"
    page = render(store(tmp_path, f"Before.\n\n{line}\n\nAfter.", "a.json"))
    assert page.startswith("# Page\n\nBefore.\n\n`asyncrl bench pipeline --quick`, 20")
    assert "(`benchmarks/results/a.json`):\n\n| max_lag | step_s | tokens |\n|---|---|---|\n" in page
    assert "| 0 | 0.4 ± 0.08 |  |\n| 4 | 0.2 | 12,346 |\n\nAfter.\n" in page


def test_a_table_without_columns_shows_all_and_no_empty_row():
    file = RowFile.taken_here("all", ROWS)
    lines = table(file, parse_directive("a.json | where: engine=real")).splitlines()
    assert lines[2] == "| max_lag | engine | step_s | idle | tokens |"
    assert len(lines) == 6
    assert len(table(file, parse_directive("a.json | values: us")).splitlines()) == 5


def test_a_file_that_no_text_shows_is_an_error(tmp_path: Path):
    with pytest.raises(DataError, match=r"shows b\.json"):
        render(store(tmp_path, "<!-- rows: a.json -->", "a.json", "b.json"))


@pytest.mark.parametrize(
    ("directive", "says"),
    [
        ("a.json | value: x", "none of bench, case"),
        ("a.json | bench: nothing", "has no row"),
        ("a.json | values: nothing", "has nothing"),
        ("b.json", "cannot be read"),
    ],
)
def test_a_line_that_cannot_be_followed_is_an_error(tmp_path: Path, directive: str, says: str):
    with pytest.raises(DataError, match=re.escape(says)):
        render(store(tmp_path, f"<!-- rows: {directive} -->", "a.json"))


def test_a_caption_says_only_what_was_recorded_of_the_machine():
    whole = RowFile.taken_here("pipeline", ROWS)
    assert f", {whole.hardware['cores']} cores, " in caption(whole, "a.json")
    bare = replace(whole, hardware={"machine": "x86_64"}, versions={})
    assert caption(bare, "a.json").endswith(", x86_64 (hardware not recorded) (`benchmarks/results/a.json`)")


def test_numbers_are_shown_with_four_digits():
    assert [show(value) for value in (12345.6, 0.012346, 3.0, 0.0)] == ["12,346", "0.01235", "3", "0"]


def missed(file: RowFile) -> Iterator[str]:
    """Yield the verdicts of targets that the figures of a file miss; none where a file has no figures."""
    for found in file.figures.get("verdicts", {}).values():
        if found["code"]:
            yield found["verdict"]
    bench = file.command.split()[0]
    module = importlib.import_module(f"benchmarks.{BENCHMARKS[bench].module}")
    if file.figures and hasattr(module, "check"):
        is_met, verdict = module.check(file.figures)
        if not is_met:
            yield verdict


def sections_of(name: str) -> str:
    """Return the texts that show rows of a stored file."""
    texts = (path.read_text(encoding="utf-8") for path in (RESULTS / "texts").glob("*.md"))
    return "\n".join(text for text in texts if f"<!-- rows: {name} " in text)


@pytest.mark.parametrize("name", sorted(path.name for path in RESULTS.glob("*.json")))
def test_a_stored_file_that_misses_a_target_has_a_section_that_says_so(name: str):
    if name in NOT_OF_ROWS:
        return
    for verdict in missed(RowFile.read(RESULTS / name)):
        assert "missed" in sections_of(name), f"{name}: {verdict}"


def test_the_file_of_weight_sync_misses_a_target_which_its_section_tells_by_its_words():
    (verdict,) = missed(RowFile.read(RESULTS / "weight_sync-2026-11-28.json"))
    assert "late joiner" in verdict and verdict in sections_of("weight_sync-2026-11-28.json")
