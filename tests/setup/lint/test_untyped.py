from pathlib import Path

import pytest
import untyped

ROOT = Path(untyped.__file__).parents[1]


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("from typing import Any", 0),
        ("def f(x: Any) -> dict[str, Any]: ...", 2),
        ("import typing\nx: typing.Any", 1),
        ("from typing import Any as A\nx: A", 1),
        ("x = any(y)", 0),
        ("x: 'AnyStr'", 0),
    ],
)
def test_each_use_of_any_counts_and_its_import_does_not(text, count):
    assert untyped.count_any(text) == count


def find(folder: Path, most: int) -> list[str]:
    module = folder / "package" / "inner" / "module.py"
    module.parent.mkdir(parents=True, exist_ok=True)
    module.write_text("x: Any\ny: Any\n")
    return list(untyped.violations(folder, {"package": most}))


def test_a_package_over_its_maximum_fails(tmp_path):
    assert find(tmp_path, 1) == ["package names `Any` 2 times, at most 1: give the value a type"]


def test_a_maximum_follows_what_is_there_so_that_it_can_only_be_lowered(tmp_path):
    assert find(tmp_path, 2) == []
    (complaint,) = find(tmp_path, 3)
    assert complaint == "package names `Any` 2 times: lower its maximum of 3 in tools/untyped.py"


def test_every_shipped_package_has_a_maximum_and_keeps_it():
    assert list(untyped.violations(ROOT, untyped.MAXIMA)) == []
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert packages - {"benchmarks", "configs", "recipes", "research"} <= untyped.MAXIMA.keys()
