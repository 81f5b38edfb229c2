import ast
from pathlib import Path

import pytest
import shape

from tests.setup.lint.test_rooms import ROOT, SHIPPED


def depth(text):
    return shape.nesting_of(ast.parse(text).body)


@pytest.mark.parametrize(
    ("text", "nesting"),
    [
        ("x = 1", 0),
        ("if a:\n  x\nelse:\n  y", 1),
        ("if a:\n  x\nelif b:\n  y\nelif c:\n  z", 1),
        ("if a:\n  x\nelse:\n  for b in c:\n    y", 2),
        ("for a in b:\n  while c:\n    if d:\n      x", 3),
        ("try:\n  x\nexcept A:\n  if b:\n    y", 2),
        ("match a:\n  case 1:\n    if b:\n      y", 2),
        ("with a:\n  with b:\n    x", 0),
        ("with a:\n  if b:\n    x", 1),
        ("if a:\n  def f():\n    if b:\n      x", 1),
    ],
)
def test_control_flow_nests_and_elif_and_with_do_not(text, nesting):
    assert depth(text) == nesting


def complaints(folder: Path, name: str, text: str) -> list[str]:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return [line.removeprefix(f"{folder}/") for line in shape.violations(shape.measure_file(path))]


def lines(count):
    return "x = 1\n" * count


def test_a_file_may_have_500_lines_and_a_test_600(tmp_path):
    assert complaints(tmp_path, "a.py", lines(500)) == []
    assert complaints(tmp_path, "a.py", lines(501)) == ["a.py: 501 lines, at most 500"]
    assert complaints(tmp_path, "tests/a.py", lines(600)) == []
    assert complaints(tmp_path, "tests/a.py", lines(601)) == ["tests/a.py: 601 lines, at most 600"]


def test_a_function_may_have_80_lines(tmp_path):
    body = "    x = 1\n"
    assert complaints(tmp_path, "a.py", "def f():\n" + body * 79) == []
    assert complaints(tmp_path, "a.py", "def f():\n" + body * 80) == ["a.py:1: f has 81 lines, at most 80"]


def test_a_method_may_nest_3_deep(tmp_path):
    text = "class A:\n async def f(self):\n  if a:\n   if b:\n    if c:\n     if d:\n      x\n"
    assert complaints(tmp_path, "a.py", text) == ["a.py:2: f nests 4 deep, at most 3"]
    assert complaints(tmp_path, "a.py", text.replace("if d:", "with d:")) == []


def test_a_class_may_have_300_lines_and_30_methods(tmp_path):
    body, method = "    x = 1\n", "    def f(self): ...\n"
    most = "at most 300, 30: take out a job that has its own state"
    assert complaints(tmp_path, "a.py", "class A:\n" + body * 299) == []
    long = complaints(tmp_path, "a.py", "class A:\n" + body * 300)
    assert long == [f"a.py:1: A has 301 lines, 0 methods, {most}"]
    assert complaints(tmp_path, "a.py", "class A:\n" + method * 30) == []
    broad = complaints(tmp_path, "a.py", "class A:\n" + method * 31)
    assert broad == [f"a.py:1: A has 32 lines, 31 methods, {most}"]


def test_a_long_class_that_is_listed_has_a_limit_of_its_own_and_one_of_a_test_has_none(tmp_path, monkeypatch):
    monkeypatch.setitem(shape.LONG_CLASSES, "A", (310, 2))
    body = "    x = 1\n"
    assert complaints(tmp_path, "a.py", "class A:\n" + body * 309) == []
    (complaint,) = complaints(tmp_path, "a.py", "class A:\n" + body * 310)
    assert "A has 311 lines, 0 methods, at most 310, 2" in complaint
    assert complaints(tmp_path, "tests/a.py", "class A:\n" + body * 310) == []


def test_a_class_that_is_no_longer_long_is_listed_no_more():
    files = [shape.measure_file(path) for top in SHIPPED for path in (ROOT / top).rglob("*.py")]
    found = [one for file in files for one in file.classes if one.name in shape.LONG_CLASSES]
    assert sorted(one.name for one in found) == sorted(shape.LONG_CLASSES), "one of each name"
    for one in found:
        assert one.num_lines > shape.MAX_CLASS_LINES, f"{one.name} needs no line of its own"
        assert one.num_lines > one.limits[0] - 30, f"{one.name} keeps what it has gained: lower its limit"


def test_a_module_name_that_says_nothing_is_refused(tmp_path):
    assert "'utils' says nothing" in complaints(tmp_path, "utils.py", "")[0]


@pytest.mark.parametrize("word", ["What", "Who", "How", "When", "Where", "Why", "Which", "Whether"])
def test_a_module_docstring_that_begins_with_a_question_word_is_refused(tmp_path, word):
    complaint = f"a.py: its docstring begins with '{word}': begin with what the module is"
    assert complaints(tmp_path, "a.py", f'"""{word} a module owns."""\n') == [complaint]
    assert complaints(tmp_path, "a.py", f'"""\n{word}, in short.\n"""\n') == [complaint]


def test_a_question_word_may_stand_elsewhere(tmp_path):
    assert complaints(tmp_path, "a.py", '"""Whole files. What they hold is text."""\n') == []
    assert complaints(tmp_path, "a.py", '"""Owner."""\ndef f():\n    """What it does."""\n') == []


def test_the_figures_are_printed_and_the_exit_code_tells(tmp_path, capsys):
    (tmp_path / "a.py").write_text("def f():\n    return 1\n")
    assert shape.main([str(tmp_path)]) == 0
    assert "1 files, 1 functions\n  function lines  median 2, p90 2, max 2\n" in capsys.readouterr().out
    (tmp_path / "misc.py").write_text("")
    assert shape.main([str(tmp_path)]) == 1
    assert "misc" in capsys.readouterr().err


def test_quantiles_are_values_that_occur():
    assert [shape.quantile(range(1, 11), percent) for percent in (0, 50, 90, 100)] == [1, 5, 9, 10]
    assert shape.quantile([], 50) == 0
