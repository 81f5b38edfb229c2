"""Code of the model's, run in the sandbox of its episode: files stay from one call to the next.

An attempt that ended left no trace of its calls where sandboxes are sealed: the next one makes them again.
"""

from __future__ import annotations

from copy import copy

from asyncrl.core.errors import ConfigError
from rollout_service.environments.protocol import EnvironmentFailed
from rollout_service.environments.tools.tool import Tool, ToolExhausted, ToolRefused
from rollout_service.sandbox.contract import Command, Sandbox, SandboxFailed

MAX_CHARS = 20_000


class Shell(Tool):
    """The tool `shell`.

    Args:
        timeout_s: Time limit of one call; what still runs then, or after the call, is killed.
    """

    name = "shell"
    description = "Runs a shell command, without network; its folder keeps files from call to call."
    argument = "command"
    uses_sandbox = True
    argv: tuple[str, ...] = ("sh", "-c")

    def __init__(self, timeout_s: float = 10.0) -> None:
        if timeout_s <= 0:
            raise ConfigError(f"the tool '{self.name}' needs a timeout_s above 0")
        self._timeout_s = timeout_s
        self._sandbox: Sandbox | None = None

    def begin(self, sandbox: Sandbox | None) -> Shell:
        begun = copy(self)
        begun._sandbox, begun.is_idempotent = sandbox, sandbox is not None and sandbox.is_sealed
        return begun

    async def call(self, text: str) -> str:
        assert self._sandbox is not None, "an episode gives it one"
        if len(text) > MAX_CHARS:
            raise ToolRefused(f"at most {MAX_CHARS} characters")
        try:
            (done,) = await self._sandbox.exec(Command([*self.argv, text], deadline_s=self._timeout_s))
        except SandboxFailed as error:
            raise EnvironmentFailed(error.message, kind="died") from error
        said = "\n".join(part.rstrip("\n") for part in (done.stdout, done.stderr) if part)
        if done.ended:
            limit = f"longer than {self._timeout_s:g} s" if done.ended == "timeout" else "too much memory"
            raise ToolExhausted(f"it took {limit}\n{said}")
        return said if done.code == 0 else f"{said}\nexit code {done.code}".lstrip("\n")


class CodeInterpreter(Shell):
    """The tool `code_interpreter`; the arguments of `Shell`."""

    name = "code_interpreter"
    description = "Runs a Python program, without network; its folder keeps files from call to call."
    argument = "code"
    argv = ("python3", "-c")
