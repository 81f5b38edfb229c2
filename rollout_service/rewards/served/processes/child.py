"""A process beside the replica that answers one request at a time, over its standard input and output.

Owns the process: it is killed with all that it started when a request takes too long, and ends by itself
when the replica does. Invariant: requests and answers are plain values; nothing that comes back is run.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping
from pathlib import Path

from asyncrl.core.config.secrets import has_password, is_secret_name
from asyncrl.core.errors import AsyncrlError, ConfigError
from rollout_service.reaping import END_DEADLINE_S, kill_and_reap
from rollout_service.rewards.served.frames import HEAD_BYTES, body_bytes, pack_frame, unpack_body

ROOT = Path(__file__).resolve().parents[4]


class ChildDied(AsyncrlError, RuntimeError):
    """The process ended before it had answered."""


class Child:
    """A started process. Only one request may be under way."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._is_group_ended = False

    @classmethod
    async def start(cls, module: str, settings: Mapping[str, object], deadline_s: float) -> Child:
        """Start `python -m module` and wait until it is ready.

        Raises:
            ConfigError: It says that it cannot use `settings`.
            ChildDied: It ended.
            TimeoutError: It was not ready after `deadline_s`.
        """
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", module),
            stdin=PIPE,
            stdout=PIPE,
            env={**allowed_environment(os.environ), "PYTHONPATH": os.pathsep.join(paths)},
            start_new_session=True,  # Ctrl-C is not for it, and all that it starts can be killed at once
        )
        child = cls(process)
        try:
            hello = await child.ask(settings, deadline_s)
        except BaseException:  # cancelled, too: nobody else knows of the process
            await child.kill()
            raise
        if "refused" in hello:
            await child.close()
            raise ConfigError(str(hello["refused"]))
        return child

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.returncode is None

    async def ask(self, request: Mapping[str, object], deadline_s: float) -> dict[str, object]:
        """Send a request and return its answer. After an error the process must be killed.

        Raises:
            ValueError: The request holds something else than plain values.
            ChildDied: The process ended.
            TimeoutError: There was no answer within `deadline_s`.
        """
        frame = pack_frame(request)
        writing, reading = self._process.stdin, self._process.stdout
        assert writing is not None and reading is not None, "both are pipes"
        try:
            async with asyncio.timeout(deadline_s):
                writing.write(frame)
                await writing.drain()
                head = await reading.readexactly(HEAD_BYTES)
                return unpack_body(await reading.readexactly(body_bytes(head)))
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise ChildDied(f"process {self.pid} ended before it had answered") from error

    async def kill(self) -> None:
        """End the process and all that it started, at once; also what it left when it ended by itself."""
        self._end_group()
        await kill_and_reap(self._process)

    async def close(self) -> None:
        """Let the process end, and kill it if it does not."""
        assert self._process.stdin is not None, "it is a pipe"
        self._process.stdin.close()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), END_DEADLINE_S)
        await self.kill()

    def _end_group(self) -> None:
        if self._is_group_ended:
            return  # the number may be another's by now
        self._is_group_ended = True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


FOR_REWARDS = "REWARD_"
"""Start of the names that a user sets for a reward, its secrets too."""
NAMES = frozenset(
    {
        *("HOME", "LANG", "LANGUAGE", "LD_LIBRARY_PATH", "LD_PRELOAD", "LOGNAME", "PATH", "SHELL", "TEMP"),
        *("TMP", "TMPDIR", "TZ", "USER", "VIRTUAL_ENV", "SSL_CERT_DIR", "SSL_CERT_FILE", "NO_PROXY"),
        *("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"),
        *("no_proxy", "http_proxy", "https_proxy", "all_proxy"),
    }
)
PREFIXES = (
    *("LC_", "XDG_", "CONDA_", "PYTHON", "COVERAGE_", "OMP_", "MKL_", "OPENBLAS_", "NUMEXPR_", "KMP_"),
    *("CUDA_", "NVIDIA_", "ROCR_", "HIP_", "TORCH", "PYTORCH_", "TRITON_", "TRANSFORMERS_", "HF_"),
    *("TOKENIZERS_", "MALLOC_"),
)


def allowed_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a reward process gets.

    >>> allowed_environment({"PATH": "/bin", "HF_HOME": "/h", "HF_TOKEN": "t", "ASYNCRL_GATEWAY_KEY": "k"})
    {'PATH': '/bin', 'HF_HOME': '/h'}
    """
    return {name: value for name, value in environment.items() if _is_allowed(name, value)}


def _is_allowed(name: str, value: str) -> bool:
    if name.startswith(FOR_REWARDS):
        return True
    is_known = name in NAMES or name.startswith(PREFIXES)
    return is_known and not is_secret_name(name) and not has_password(value)
