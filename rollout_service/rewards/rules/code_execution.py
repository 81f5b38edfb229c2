"""The reward `code_execution`: the response's program is run in a sandbox against the tests of its row.

Forms of a ground truth, also as JSON text: verl's and prime's `inputs` and `outputs` (programs that read and
print; with `fn_name` arguments and results of that function), `assert_case` or a list of asserts (MBPP), a
list of `input` and `output` (APPS), `test` and `entry_point` (HumanEval), or Python text with asserts.

Invariant: outputs and results are compared outside of the sandbox, which never sees them. Asserts share a
process with the program; only a number that the program was not told makes them count as passed.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from asyncrl.core.errors import ConfigError
from asyncrl.core.experience import CUT_REASONS
from asyncrl.core.states import Reason
from rollout_service.rewards.score import Answer, RewardError, Score
from rollout_service.sandbox.contract import Command, Completed, SandboxFailed
from rollout_service.sandbox.local import LocalSandbox, make_sandboxes

BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)
FILE = "solution.py"
AT_ONCE = 8
"""Tests in one call of the sandbox: after each call a failure or the deadline ends the rest."""
OUTPUT_BYTES = 1 << 20
DRIVER = """
import json, sys
told = json.loads(sys.stdin.readline())
scope = {"__name__": "solution"}
exec(compile(open("solution.py").read(), "solution.py", "exec"), scope)
if told["function"]:
    made = scope["Solution"]() if "Solution" in scope else None
    result = (getattr(made, told["function"], None) or scope[told["function"]])(*told["arguments"])
else:
    exec(told["asserts"], scope)
    result = True
sys.stdout.write("\\n" + told["mark"] + json.dumps(result))
"""


@dataclass(frozen=True)
class Test:
    """One test: what a program reads and prints, a function's arguments and result, or asserts."""

    stdin: str = ""
    wanted: object = True
    function: str = ""
    arguments: Sequence[object] = ()
    asserts: str = ""

    def command(self, mark: str, deadline_s: float) -> Command:
        """Return what runs it."""
        if not (self.function or self.asserts):
            return Command(["python3", FILE], self.stdin.encode("utf-8", "replace"), deadline_s)
        told = {"function": self.function, "arguments": self.arguments, "asserts": self.asserts, "mark": mark}
        return Command(["python3", "-c", DRIVER], json.dumps(told).encode() + b"\n", deadline_s)

    def is_passed(self, done: Completed, mark: str) -> bool:
        """Tell whether the program did what it should."""
        if done.ended or done.code != 0:
            return False
        if not (self.function or self.asserts):
            return _prints_alike(done.stdout, str(self.wanted))
        try:
            result = json.loads(done.stdout.rpartition(mark)[2])
        except (ValueError, RecursionError):  # it did not come so far, or went on
            return False
        is_wrapped = isinstance(self.wanted, list) and self.wanted == [result]
        return mark in done.stdout and (result == self.wanted or is_wrapped)


class CodeExecution:
    """A part whose value is 1 if all tests pass, else 0.

    Args:
        continuous: Whether the value is the share of tests that pass.
        test_deadline_s: Of one test. deadline_s: Of all; tests that were not run by then have failed.
        sandbox: Settings of the sandboxes (`SandboxSettings`).

    Raises:
        ConfigError: This machine cannot isolate, and `sandbox` does not allow that.
    """

    def __init__(
        self,
        name: str,
        continuous: bool = False,
        test_deadline_s: float = 5.0,
        deadline_s: float = 60.0,
        sandbox: Mapping[str, object] | None = None,
    ) -> None:
        if min(test_deadline_s, deadline_s) <= 0:
            raise ConfigError(f"the deadlines of the reward '{name}' must be above 0")
        self.name = name
        self._continuous = continuous
        self._deadlines = test_deadline_s, deadline_s
        self._sandboxes = make_sandboxes({"output_bytes": OUTPUT_BYTES} | dict(sandbox or {}))

    async def start(self) -> None:
        """Nothing is needed."""

    async def value(self, answer: Answer) -> Score:
        """Return the number. Raises RewardError: the row has no tests, or the sandbox failed."""
        try:
            tests = find_tests(answer.prompt.ground_truth)
        except (ValueError, KeyError, TypeError) as error:
            what = f"the reward '{self.name}' cannot read the tests of row {answer.prompt.row}: {error!r}"
            raise RewardError(what, kind="refused") from error
        blocks = BLOCK.findall(answer.response)
        if not blocks:
            return Score(
                0.0, reason=Reason.TRUNCATED if answer.finish_reason in CUT_REASONS else Reason.NO_ANSWER
            )
        box = self._sandboxes.create()
        box.write({FILE: blocks[-1].encode("utf-8", "replace")})
        try:
            num_passed = await self._count_passed(box, tests)
        except SandboxFailed as error:
            what = f"the reward '{self.name}' (row {answer.prompt.row}): {error.message}"
            raise RewardError(what, kind="died") from error
        return Score(num_passed / len(tests) if self._continuous else float(num_passed == len(tests)))

    async def close(self) -> None:
        """Nothing was started."""

    def child_pids(self) -> list[int]:
        """Return none: a sandbox lives as long as a call."""
        return []

    async def _count_passed(self, box: LocalSandbox, tests: Sequence[Test]) -> int:
        test_s, all_s = self._deadlines
        end, num_passed, waiting = asyncio.get_running_loop().time() + all_s, 0, iter(tests)
        for num_run in itertools.count(0, AT_ONCE):
            some = list(itertools.islice(waiting, AT_ONCE))
            has_failed = num_passed < num_run and not self._continuous
            if not some or has_failed or asyncio.get_running_loop().time() > end:
                break
            mark = os.urandom(16).hex()
            done = await box.exec(*(test.command(mark, test_s) for test in some))
            num_passed += sum(test.is_passed(one, mark) for test, one in zip(some, done, strict=True))
        return num_passed


def find_tests(ground_truth: object) -> list[Test]:
    """Return the tests of a row. Raises ValueError, KeyError or TypeError: there are none in a known form."""
    told = ground_truth
    if isinstance(told, str):
        try:
            told = json.loads(told)
        except ValueError:
            told = [told]
    if isinstance(told, Mapping) and "inputs" in told:
        pairs = zip(told["inputs"], told["outputs"], strict=True)
        tests = [_pair(given, wanted, told.get("fn_name") or "") for given, wanted in pairs]
        tests += [Test(asserts=text) for text in told.get("assert_case") or ()]
    elif isinstance(told, Mapping):
        check = f"{told['test']}\ncheck({told['entry_point']})" if "test" in told else ""
        tests = [Test(asserts=text) for text in ([check] if check else told["assert_case"])]
    elif isinstance(told, Sequence) and not isinstance(told, str):
        tests = [
            Test(asserts=one) if isinstance(one, str) else _pair(one["input"], one["output"], "")
            for one in told
        ]
    else:
        raise TypeError(f"a {type(told).__name__}")
    if not tests or Test() in tests:
        raise ValueError("no tests")
    return tests


def _pair(given: object, wanted: object, function: str) -> Test:
    if not function:
        return Test(_lines(given), _lines(wanted))
    arguments = [json.loads(line) for line in given.splitlines()] if isinstance(given, str) else given
    if not isinstance(arguments, list):
        raise TypeError(f"the arguments are a {type(arguments).__name__}")
    return Test(
        wanted=json.loads(wanted) if isinstance(wanted, str) else wanted,
        function=function,
        arguments=arguments,
    )


def _lines(told: object) -> str:
    return "\n".join(map(str, told)) if isinstance(told, list) else str(told)


def _prints_alike(said: str, wanted: str) -> bool:
    """Tell whether two texts have the same words in the same lines; numbers may differ by rounding."""
    first, second = ([line.split() for line in text.strip().splitlines()] for text in (said, wanted))
    if [len(line) for line in first] != [len(line) for line in second]:
        return False
    return all(map(_is_alike, itertools.chain(*first), itertools.chain(*second)))


def _is_alike(said: str, wanted: str) -> bool:
    try:
        return said == wanted or math.isclose(float(said), float(wanted), rel_tol=1e-5, abs_tol=1e-8)
    except ValueError:
        return False
