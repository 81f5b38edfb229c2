"""Facts read from the text of a user's function: they agree with Python's own view, or there are none."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest

from asyncrl.core.config.tree import EnvironmentSection, RewardPart
from rollout_service import declared
from rollout_service.environments.registry import check_file as check_environment
from rollout_service.rewards.registry import check_file as check_reward

PARAMETERS = ("", "a", "a, b=1", "a, /, b, *, c, d=2", "*a, **b", "a=1, /, b=2, *c, d, **e", "*, a=[]")


@pytest.mark.parametrize("text", PARAMETERS)
def test_a_signature_that_is_read_is_that_of_the_function(text: str) -> None:
    source = f"def f({text}): ..."
    (definition,) = ast.parse(source).body
    assert isinstance(definition, ast.FunctionDef)
    scope: dict[str, object] = {}
    exec(source, scope)
    found, wanted = (inspect.signature(one) for one in (declared.stand_in(definition), scope["f"]))
    assert [(one.name, one.kind) for one in found.parameters.values()] == [
        (one.name, one.kind) for one in wanted.parameters.values()
    ]
    for one in wanted.parameters.values():
        assert (found.parameters[one.name].default is one.empty) == (one.default is one.empty)


@pytest.mark.parametrize(
    "source",
    [
        "import functools\n@functools.cache\ndef f(): ...",
        "def f(): ...\nf = print",
        "def f(): ...\nfrom other import f",
        "def f(): ...\nfrom other import *",
        "if True:\n    def f(): ...",
        "def f(): ...\ndef f(a): ...",
        "def f(): ...\ndef g():\n    global f\n    f = print",
        "f = lambda: None",
        "async def f(): ...",
        "def f(",
    ],
)
def test_a_reward_that_is_not_a_plain_def_is_not_judged(tmp_path: Path, source: str) -> None:
    (tmp_path / "mine.py").write_text(source)
    check_reward(RewardPart(fn=f"{tmp_path}/mine.py:f"))


@pytest.mark.parametrize("body", ["return 1", "yield 1", "if a: return b\n    print(a)", "return (yield)"])
def test_a_reward_that_may_return_something_is_not_judged(tmp_path: Path, body: str) -> None:
    (tmp_path / "mine.py").write_text(f"def f(a, b):\n    {body}\n")
    check_reward(RewardPart(fn=f"{tmp_path}/mine.py:f"))


@pytest.mark.parametrize(
    "source",
    [
        "class E(Other): ...",
        "from mine import Environment\nclass E(Environment): ...",
        "class E(metaclass=M): ...",
        "import dataclasses\n@dataclasses.dataclass\nclass E: ...",
        "class E:\n    start = step = score = close = other",
    ],
)
def test_an_environment_that_may_have_its_methods_from_elsewhere_is_not_judged(
    tmp_path: Path, source: str
) -> None:
    (tmp_path / "mine.py").write_text(source)
    check_environment(EnvironmentSection(name=f"{tmp_path}/mine.py:E"))
