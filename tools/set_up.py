"""Setup of an environment from a pinned list: `python3.11 tools/set_up.py [cpu|gpu|sglang|agents]`.

Standard library only. The lists `cpu` and `gpu` make `.venv`; `sglang`, whose pins clash with theirs, makes
`.venv-sglang` beside it, for the SGLang engine's own processes, and `agents` makes `.venv-agents`, for the
harnesses that tests of the gateway start. Every package comes from where the machine's
pip is configured to look, and is one of the files whose hashes are in the list, wherever it lies. Repeating
it is cheap and changes nothing. The stamp `.set-up-<list>` in the environment is written last, so that a
broken try is repeated.
"""

from __future__ import annotations

import contextlib
import os
import platform
import signal
import subprocess
import sys
import threading
import time
import venv
from collections.abc import Iterator
from pathlib import Path

from pip_settings import read_pip_settings, uv_environment

ROOT = Path(__file__).resolve().parent.parent
LISTS = {"cpu": ROOT / ".venv", "gpu": ROOT / ".venv"}
LISTS |= {name: ROOT / f".venv-{name}" for name in ("sglang", "agents")}
"""Environment of each list; those of one environment exclude each other."""
DEADLINE_S = 1800.0
TORCH_IS_MISSING = (
    "torch's CPU build (torch==...+cpu) was not found where pip is configured to look: add PyTorch's CPU "
    "wheel index, or a folder with that wheel, with 'pip config set global.extra-index-url URL' or "
    "'pip config set global.find-links FOLDER', then run 'make setup' again"
)


class SetUpFailed(Exception):
    """Reason why the environment could not be made, in one sentence for the terminal."""


def main(argv: list[str]) -> int:
    """Return the exit code; a failure is one message."""
    name = argv[0] if argv else "cpu"
    try:
        check_machine(platform.system(), platform.machine(), sys.version_info[:2])
        if name not in LISTS:
            raise SetUpFailed(f"there is no list '{name}': choose {' or '.join(LISTS)}")
        set_up(name)
    except SetUpFailed as error:
        print(f"set-up: {error}", file=sys.stderr)
        return 1
    return 0


def check_machine(system: str, machine: str, python: tuple[int, int]) -> None:
    """Raise SetUpFailed unless the pinned packages exist for this machine."""
    if (system, machine) != ("Linux", "x86_64"):
        raise SetUpFailed(
            f"asyncrl runs on Linux x86-64, and this is {system} {machine}; use a Linux machine"
        )
    if python != (3, 11):
        raise SetUpFailed(f"asyncrl needs Python 3.11, and this is {python[0]}.{python[1]}")


def set_up(name: str) -> None:
    """Bring its environment to the pinned list `name`."""
    start, folder = time.monotonic(), LISTS[name]
    make_venv(folder)
    python = folder / "bin" / "python"
    run([str(python), "-m", "pip", "install", "--quiet", *of_list("uv")], dict(os.environ))
    environment = uv_environment(read_pip_settings(python), os.environ)
    uv = uv_install(folder, folder)
    install_list([*uv, *of_list(name)], environment)
    with compiling(folder):
        run([*uv, "--no-build-isolation", "--editable", "."], environment)
    check_installed(name)
    for other in LISTS:
        (folder / f".set-up-{other}").unlink(missing_ok=True)
    (folder / f".set-up-{name}").write_text("")
    print(f"set-up: {folder.name} is ready ({time.monotonic() - start:.0f} s)", file=sys.stderr)


def uv_install(home: Path, folder: Path) -> list[str]:
    """Return the command of the uv in the environment `home` that installs into the one in `folder`."""
    return [str(home / "bin" / "uv"), "pip", "install", "--python", str(folder / "bin/python"), "--no-deps"]


def of_list(name: str) -> list[str]:
    """Return the options of pip and uv that install a list, and no file whose hash it has not."""
    return ["--require-hashes", "--requirement", f"requirements/{name}.txt"]


def make_venv(folder: Path) -> None:
    """Make the environment in `folder` with pip in it, unless it is there."""
    python = folder / "bin" / "python"
    command = [str(python), "-c", "import pip, sys; sys.exit(sys.version_info[:2] != (3, 11))"]
    if python.exists() and subprocess.run(command, capture_output=True, check=False).returncode == 0:
        return
    print(f"set-up: making {folder.name}", file=sys.stderr)
    venv.create(folder, with_pip=True, symlinks=True)


def install_list(command: list[str], environment: dict[str, str]) -> None:
    """Install the pinned list; where no configured place has torch's CPU build, from PyTorch's own index."""
    try:
        run(command, environment)
    except SetUpFailed as error:
        if not is_torch_missing(str(error)):
            raise
        try:
            run(command, {**environment, "UV_TORCH_BACKEND": "cpu"})
        except SetUpFailed:
            raise SetUpFailed(TORCH_IS_MISSING) from error


def is_torch_missing(output: str) -> bool:
    """Tell whether uv stopped because it found no CPU build of torch; a changed one is something else."""
    return "Hash mismatch" not in output and any(
        "torch==" in line and "+cpu" in line for line in output.splitlines()
    )


@contextlib.contextmanager
def compiling(folder: Path) -> Iterator[None]:
    """Byte-compile what asyncrl imports, while something else is done."""
    python, packages = folder / "bin" / "python", folder / "lib" / "python3.11" / "site-packages"
    command = [str(python), "tools/bytecode.py", str(packages)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    try:
        yield
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(DEADLINE_S)
        if process.returncode != 0:  # only slower without: each process compiles for itself
            print("set-up: not all packages could be byte-compiled", file=sys.stderr)
    finally:
        process.kill()
        process.wait()


def run(command: list[str], environment: dict[str, str]) -> None:
    """Run `command` in the repository; its talk goes to stderr, without the list of each package.

    Raises:
        SetUpFailed: It failed, or took longer than the deadline; the message holds what it said.
    """
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    said, what = list[str](), f"'{' '.join(command[:4])} ...'"
    with ending(process) as is_late:
        assert process.stdout is not None
        for line in process.stdout:
            said.append(line)
            if not line.startswith((" + ", " - ", " ~ ")):
                sys.stderr.write(line)
        code = process.wait()
    if code:
        why = f"took longer than {DEADLINE_S:g} s" if is_late.is_set() else "failed"
        raise SetUpFailed(f"{what} {why}:\n{''.join(said[-20:])}")


@contextlib.contextmanager
def ending(process: subprocess.Popen[str]) -> Iterator[threading.Event]:
    """Kill `process` and all that it started at the deadline, which an event tells, or at the end."""
    is_late = threading.Event()

    def kill() -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    def end() -> None:
        is_late.set()
        kill()

    timer = threading.Timer(DEADLINE_S, end)
    timer.start()
    try:
        yield is_late
    finally:
        timer.cancel()
        if process.returncode is None:
            kill()
            process.wait()


def check_installed(name: str) -> None:
    """Raise SetUpFailed if CUDA packages stand in a CPU environment: they would shadow its torch."""
    folder = LISTS[name]
    found = sorted(path.name for path in folder.glob("lib/python3.11/site-packages/nvidia_*.dist-info"))
    if name != "gpu" and found:
        raise SetUpFailed(
            f"{folder.name} holds CUDA packages ({', '.join(found[:3])}): "
            f"remove the folder {folder.name} and run 'make setup' again"
        )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
