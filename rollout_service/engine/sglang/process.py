"""The child process of one SGLang engine as the adapter sees it: started, asked, ended.

SGLang's pins clash with the main environment's, so the child runs in one of its own, and in a session of its
own: SGLang kills the process tree of whoever started it. The connection is a pair of sockets that the child
inherits; closing this end ends all of the child's session. Invariant: no question outlives the child.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from asyncrl.core.errors import EngineError, WireError
from rollout_service.engine.protocol import EngineDied
from rollout_service.engine.sglang.messages import Answer, Ask, Channel, Failed, Generated

ROOT = Path(__file__).resolve().parents[3]
PYTHON = ROOT / ".venv-sglang" / "bin" / "python"
"""The interpreter that `make setup LIST=sglang` makes."""
MODULE = "rollout_service.engine.sglang.child"
STAND_INS = Path(__file__).parent / "stand_ins"
END_S = 10.0
EVERYWHERE = {
    "HF_HUB_OFFLINE": "1",
    "PYTHONSAFEPATH": "1",
    # The context is longer than the model's by the positions that SGLang keeps for itself.
    "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
}
ON_CPU = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "OMP_NUM_THREADS": "1",
    # Else the first seeded token waits 31 s for a compiler.
    "TORCH_COMPILE_DISABLE": "1",
    "PYTHONPATH": str(STAND_INS),
}


class ChildProcess:
    """See the module. All calls come from one event loop."""

    def __init__(self, python: Path, has_gpu: bool) -> None:
        self._python = python
        self._environment = {**EVERYWHERE, **({} if has_gpu else ON_CPU)}
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Channel[Answer] | None = None
        self._reading: asyncio.Task[None] | None = None
        self._folder = ""
        self._numbers = itertools.count(1)
        self._asked: dict[int, asyncio.Future[Answer]] = {}
        self._takers: dict[int, Callable[[Generated], None]] = {}
        self.death: EngineDied | None = None

    @property
    def pid(self) -> int:
        """Of the child, which is the number of its session too; 0 before `start`."""
        return self._process.pid if self._process else 0

    async def start(self) -> None:
        """Start the child. Raises EngineError without an interpreter that could run it."""
        hint = "Run make setup LIST=sglang, or name another in rollout.engine_args: {python: ...}"
        if not os.access(self._python, os.X_OK):
            raise EngineError(f"there is no interpreter for SGLang at {self._python}", hint=hint)
        ours, theirs = socket.socketpair()
        self._folder = tempfile.mkdtemp(prefix="asyncrl-sglang-")
        inherited = {
            name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")
        }
        with theirs:
            self._process = subprocess.Popen(
                [self._python, "-m", MODULE, str(theirs.fileno())],
                env={**inherited, **self._environment, "TMPDIR": self._folder},
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        self._channel = await Channel.over(ours, Answer)
        self._reading = asyncio.create_task(self._read(self._channel))

    def new_number(self) -> int:
        """Return the number of the next message."""
        return next(self._numbers)

    async def ask(
        self,
        ask: Ask,
        what: str,
        within_s: float | None = None,
        take: Callable[[Generated], None] | None = None,
    ) -> Answer:
        """Return the answer to `ask`; None waits as long as the child lives. `take` gets the parts before.

        Raises:
            EngineError: The child could not do it, or not in time.
            EngineDied: The child is gone.
        """
        if self.death is not None:
            raise self.death
        if take is not None:
            self._takers[ask.number] = take
        answer = self._asked[ask.number] = asyncio.get_running_loop().create_future()
        try:
            self.tell(ask)
            async with asyncio.timeout(within_s):
                found: Answer = await answer
        except TimeoutError as error:
            raise EngineError(f"SGLang did not finish {what} within {within_s:g} s") from error
        finally:
            self._asked.pop(ask.number, None)
            self._takers.pop(ask.number, None)
        if isinstance(found, Failed):
            raise EngineError(f"SGLang refused {what}: {found.why}")
        return found

    def tell(self, ask: Ask) -> None:
        """Send a message whose answer nobody waits for here."""
        assert self._channel is not None, "the child was started"
        self._channel.send(ask)

    async def end(self) -> None:
        """End the child's whole session: it does so itself, and is killed if it does not in time."""
        if self._reading is not None:
            self._reading.cancel()
        self._fail(EngineDied("the engine was shut down"))
        if self._channel is not None:
            self._channel.close()
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(self._process.wait, END_S)
            self._kill_session()
            await asyncio.to_thread(self._process.wait, END_S)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _hand_out(self, answer: Answer) -> None:
        if isinstance(answer, Generated) and not answer.finish_reason:
            if (take := self._takers.get(answer.number)) is not None:
                take(answer)
        elif (waiting := self._asked.get(answer.number)) is not None and not waiting.done():
            waiting.set_result(answer)

    async def _read(self, channel: Channel[Answer]) -> None:
        """Hand out the answers until the child is gone, or says what is none."""
        why = ""
        try:
            while (answer := await channel.receive()) is not None:
                self._hand_out(answer)
        except WireError as error:
            why = f": {error}"
        assert self._process is not None, "the child was started"
        self._kill_session()  # what is left of one whose leader is gone
        how = "goes on although it was killed"  # as one that waits for a GPU's driver
        with contextlib.suppress(subprocess.TimeoutExpired):
            how = f"ended with status {await asyncio.to_thread(self._process.wait, END_S)}"
        self._fail(EngineDied(f"SGLang's process {how}{why}; its log lines are above"))

    def _kill_session(self) -> None:
        assert self._process is not None, "the child was started"
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _fail(self, error: EngineDied) -> None:
        self.death = self.death or error
        for waiting in self._asked.values():
            if not waiting.done():
                waiting.set_exception(self.death)


def interpreter(engine_args: Mapping[str, object]) -> Path:
    """Return the Python of SGLang's environment."""
    return Path(str(engine_args.get("python", PYTHON)))
