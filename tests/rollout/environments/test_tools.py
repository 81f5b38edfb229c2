"""Tools: the calculator, sandboxed expressions, and how calls are written and answered."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from asyncrl.core.errors import ConfigError
from rollout_service.environments.tools.calculator import calculate
from rollout_service.environments.tools.python_expression import CHILD, PythonExpression
from rollout_service.environments.tools.tool import MAX_RESULT_CHARS, ToolRefused
from rollout_service.environments.tools.tool_use import MAX_CALLS, ToolUse

LONG_S = 60.0


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("47*83", "3901"),
        ("(2 + 3) * 4 / 8", "2.5"),
        ("-7 // 2", "-4"),
        ("7 % 4", "3"),
        ("2 ** 10", "1024"),
        ("1/3", "0.333333333333"),
        (" 1e3 ", "1000"),
        ("10**100", str(10**100)),
    ],
)
def test_the_calculator_computes(text: str, value: str):
    assert calculate(text) == value


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("1/0", "division by zero"),
        ("0**-1", "division by zero"),
        ("9**9**9", "too large"),
        ("10**101", "too large"),
        ("1e400", "too large"),
        ("(-8)**0.5", "not a real number"),
        ("1 +", "not an arithmetic"),
        ("(" * 150, "not an arithmetic"),
        ("", "not an arithmetic"),
        ("__import__('os')", "only numbers"),
        ("1 if 1 else 2", "only numbers"),
        ("1,000", "only numbers"),
        ("1" * 201, "200 characters"),
    ],
)
def test_the_calculator_says_what_it_cannot_compute(text: str, reason: str):
    with pytest.raises(ToolRefused, match=reason):
        calculate(text)


def with_python(work: Callable[[PythonExpression], Awaitable[Any]], **limits: Any) -> Any:
    async def run() -> Any:
        tool = PythonExpression(**{"timeout_s": LONG_S} | limits)
        try:
            return await work(tool)
        finally:
            await tool.close()

    return asyncio.run(run())


async def answers(tool: PythonExpression, texts: Sequence[str]) -> list[str]:
    found = []
    for text in texts:
        try:
            found.append(await tool.call(text))
        except ToolRefused as error:
            found.append(f"refused: {error}")
    return found


def test_expressions_are_evaluated_as_python_does():
    texts = [
        "sum(x * x for x in range(10) if x % 2)",
        "{a: b for a, b in zip('ab', [1, 2])}",
        "[(x, y) for x in range(3) for y in range(x) if (x, y) != (2, 0)]",
        "math.sqrt(2) * pi - math.pi",
        "sorted({3, 1, 2}, reverse=True)[0:2]",
        "1 if 2 > 1 > 0 and not None else 3",
        "'abc'[::-1] + str(7)",
        "[1, 2] + [0] * 2",
        "divmod(-7, 2)",
        "0 or 5 or 1 / 0",
        "3 in [1, 2, 3], 4 not in {4}",
        "~5 & 0xff",
    ]
    names = {"math": __import__("math"), "pi": __import__("math").pi}
    wanted = [repr(eval(text, names)) for text in texts]  # noqa: S307 - our own texts
    assert with_python(lambda tool: answers(tool, texts)) == wanted


ESCAPES = [
    "().__class__.__bases__",
    "(1).real",
    "''.join",
    "math.__loader__",
    "math.sqrt.__self__",
    "__import__('os')",
    "eval('1')",
    "exec('1')",
    "open('/etc/passwd')",
    "globals()",
    "getattr(1, 'real')",
    "lambda: 1",
    "f'{1}'",
    "(x := 1)",
    "print(1)",
    "[abs][0](1)",
    "sorted([1], key=len)",
    "max(*[1, 2])",
    "dict(**{})",
    "[0 for (1).real in [1]]",
    "import os",
    "x = 1",
    "await 1",
    "b'1'",
    "1j",
    "...",
    "'\x00'",
    "((((" * 100,
]


def test_nothing_but_values_operators_and_named_functions_is_known_to_an_expression():
    found = with_python(lambda tool: answers(tool, ESCAPES))
    assert [
        text for text, answer in zip(ESCAPES, found, strict=True) if not answer.startswith("refused")
    ] == []
    assert with_python(lambda tool: answers(tool, ["max(*[1, 2])"])) == ["refused: Starred is not allowed"]


def test_an_expression_that_takes_too_long_is_killed_and_the_next_one_has_a_new_process():
    async def work(tool: PythonExpression) -> list[str]:
        first = await answers(tool, ["1+1"])
        pid = tool._idle[0].pid
        tool._timeout_s = 0.4
        found = await answers(tool, ["9**9**9"])
        tool._timeout_s = LONG_S
        found += await answers(tool, ["2+2"])
        assert tool._idle[0].pid != pid
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
        return [*first, *found]

    found = with_python(work)
    assert found == ["2", "refused: it took longer than 0.4 s", "4"]


def test_a_process_that_has_no_room_says_so_and_lives_on():
    found = with_python(lambda tool: answers(tool, ["'a' * 10**9", "[0] * 10**9", "'%900000000d' % 1", "1"]))
    assert found == [*["refused: MemoryError: "] * 3, "1"]


def test_a_call_that_is_cancelled_leaves_no_process_for_others():
    async def work(tool: PythonExpression) -> str:
        assert await tool.call("1") == "1"
        call = asyncio.create_task(tool.call("9**9**9"))
        while tool._idle:
            await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert tool._idle == []
        return await tool.call("1")

    assert with_python(work, processes=1) == "1"


def test_more_calls_than_processes_wait_for_their_turn():
    async def work(tool: PythonExpression) -> list[str]:
        found = await asyncio.gather(*(tool.call(f"{number} * 2") for number in range(20)))
        assert len(tool._idle) <= 2
        return found

    assert with_python(work) == [str(2 * number) for number in range(20)]


def run_child(cpu_s: int, *texts: str) -> tuple[int, list[dict[str, Any]]]:
    lines = "".join(json.dumps(text) + "\n" for text in texts)
    command = [sys.executable, "-I", "-S", str(CHILD), str(256 << 20), str(cpu_s)]
    done = subprocess.run(command, input=lines, capture_output=True, text=True, env={}, timeout=240)
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()]


def test_the_child_ends_itself_when_it_computes_too_long_and_when_nobody_asks_any_more():
    assert run_child(5, "1+1") == (0, [{"ok": True, "text": "2"}])
    code, found = run_child(1, "1", "9**9**9", "2")
    assert code == -24  # SIGXCPU: its limit of processor time, without the parent's doing
    assert found == [{"ok": True, "text": "1"}]


def test_the_child_can_open_and_start_nothing(tmp_path: Path):
    """The limits hold for any code in that process, should an expression ever find a way to run some."""
    code = (
        f"import sys, os; sys.path.insert(0, {str(CHILD.parent)!r})\n"
        "import expression_child as child\nchild.limit(256 << 20)\nrefused = []\n"
        f"path = {str(tmp_path / 'x')!r}\n"
        "acts = (lambda: open(path, 'w'), lambda: os.pipe(), lambda: bytearray(1 << 30))\n"
        "for act in acts:\n"
        "    try: act()\n    except (OSError, MemoryError) as error: refused.append(type(error).__name__)\n"
        "print(refused)"
    )
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, env={})
    assert done.stdout.strip() == "['OSError', 'OSError', 'MemoryError']", done.stderr


def test_every_child_writes_a_set_of_texts_in_the_same_order():
    text = "str({'ab', 'cd', 'ef', 'gh', 'ij', 'kl', 'mn'})"

    async def ask(tool: PythonExpression) -> list[str]:
        found = []
        for _ in range(3):
            found += await answers(tool, [text])
            await tool.close()
        return found

    assert len(set(with_python(ask))) == 1


def test_limits_under_which_nothing_works_are_refused():
    for limits in ({"timeout_s": 0.0}, {"memory_bytes": 1}, {"processes": 0}):
        with pytest.raises(ConfigError, match="cannot work"):
            PythonExpression(**limits)


def json_call(name: str = "calculator", arguments: Any = None) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def step(answer: str, **arguments: Any) -> tuple[list[str], bool]:
    """Return what the model reads, message by message, and whether the episode is over."""
    found = asyncio.run(ToolUse(**arguments)(None, 0).step(answer))  # type: ignore[arg-type]
    if isinstance(found.observation, str):
        return [found.observation], found.is_done
    return [message["content"] for message in found.observation], found.is_done


def test_each_call_of_a_turn_gets_its_result_in_order():
    calls = json_call(arguments={"expression": "1+1"}) + "and" + json_call(arguments={"expression": "2*3"})
    assert step(f"<think>hm</think>{calls}") == (["2", "6"], False)


def test_a_turn_without_a_call_is_the_answer():
    assert step("the answer is 5")[1]
    assert step("7", call=r"\?(.+)")[1]


@pytest.mark.parametrize(
    ("answer", "result"),
    [
        (json_call(arguments={"expression": "1/0"}), "error: division by zero"),
        (json_call("shell", {"expression": "1"}), "error: there is no tool 'shell', only calculator"),
        (json_call(arguments={"text": "1"}), "error: 'calculator' needs the text 'expression'"),
        (json_call(arguments={"expression": 1}), "error: 'calculator' needs the text 'expression'"),
        (json_call(arguments=[1]), "error: the 'arguments' of a call are an object"),
        ("<tool_call>{}</tool_call>", "error: a call is an object with 'name' and 'arguments'"),
        ("<tool_call>{1}</tool_call>", "error: the call is not JSON"),
        ("<tool_call>" + "[" * 100_000, "error: the call is not JSON"),
        ('<tool_call>{"name": "calculator", "arguments": {"expression": "3*3"}}', "9"),
    ],
)
def test_a_call_that_cannot_be_answered_is_answered_with_the_reason(answer: str, result: str):
    (found,), is_done = step(answer)
    assert found.startswith(result) and not is_done


def test_only_so_many_calls_of_one_turn_are_made():
    found, _ = step(json_call(arguments={"expression": "1"}) * (MAX_CALLS + 2))
    assert found == ["1"] * MAX_CALLS + [f"error: at most {MAX_CALLS} calls in one turn"] * 2


def test_results_are_cut_to_a_length_that_leaves_room_for_the_model():
    found, _ = step(json_call("python", {"expression": "'x' * 50000"}), tools={"python": {"timeout_s": 30.0}})
    assert len(found[0]) == MAX_RESULT_CHARS + len("...")


def test_a_pattern_makes_calls_of_models_without_a_chat_template():
    arguments = {"call": r"\?(.+)", "reply": "!{result}="}
    assert step("?47*83", **arguments) == (["!3901="], False)
    assert step("??", **arguments) == (["!error: only numbers, + - * / // % ** and brackets="], False)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"tools": ["browser"]}, "no tool 'browser'"),
        ({"tools": []}, "no tools"),
        ({"tools": {"python": {"seconds": 1}}}, "does not take"),
        ({"call": "("}, "is not a regular expression"),
        ({"call": r"\?.+"}, "0 groups"),
        ({"call": "(.)", "reply": "x"}, "no place for the result"),
        ({"call": "(.)", "tools": ["calculator", "python"]}, "one tool only"),
    ],
)
def test_tools_that_cannot_be_had_are_refused_at_the_start(arguments: dict[str, Any], problem: str):
    with pytest.raises(ConfigError, match=problem):
        ToolUse(**arguments)


def test_tools_are_described_as_chat_templates_want_them():
    (schema,) = ToolUse(["calculator"]).tools
    assert schema["function"]["name"] == "calculator"
    assert schema["function"]["parameters"]["required"] == ["expression"]
