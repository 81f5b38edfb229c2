"""Byte-compiler of asyncrl's imports: `python tools/bytecode.py SITE_PACKAGES` (standard library only).

Of the 26,000 modules that are installed a run imports 5,500. The script follows imports: all of asyncrl's own
(also inside functions), and module-level imports of dependencies. Other modules are compiled when they are
first imported, as always.

Where PYTHONDONTWRITEBYTECODE is set, each process would compile its own imports, and the import of vLLM
would take 15 s instead of 7.5.
"""

from __future__ import annotations

import dis
import importlib.util
import marshal  # unpickles: bytecode that Python itself has just written, or would load
import multiprocessing
import os
import py_compile
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor  # unpickles: what it sent itself
from pathlib import Path
from types import CodeType

ROOT = Path(__file__).resolve().parent.parent
OWN = ("asyncrl", "learner", "rollout_service", "tests", "weight_sync")
BY_NAME = (
    "ray._private.workers.default_worker",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.qwen3.modeling_qwen3",
    "vllm.model_executor.models.qwen3",
    "vllm.platforms.cpu",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
)
"""Modules that libraries import by name at run time."""
HEADER_BYTES = 16
CHUNK = 40
IMPORT_NAME, LOAD_CONST = dis.opmap["IMPORT_NAME"], dis.opmap["LOAD_CONST"]


def main(site_packages: Path) -> int:
    """Compile the modules reached in `site_packages` and return their number."""
    reached: set[Path] = set()
    # A fork of a process that has threads may wait for ever for a lock that one of them held.
    context = multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(os.cpu_count(), context) as pool:  # unpickles: what it sent itself
        own = [path for package in OWN for path in sorted((ROOT / package).rglob("*.py"))]
        names = set(BY_NAME).union(*pool.map(imports_of_own, own, chunksize=CHUNK))
        while new := {file for name in names for file in files_of(site_packages, name)} - reached:
            reached |= new
            modules = [(file, package_of(site_packages, file)) for file in sorted(new)]
            names = set().union(*pool.map(compile_module, modules, chunksize=CHUNK))
    return len(reached)


def imports_of_own(path: Path) -> set[str]:
    """Return the imports of one of asyncrl's modules, also within its functions."""
    return imports_of(compile(path.read_bytes(), str(path), "exec"), package="", is_deep=True)


def compile_module(module: tuple[Path, str]) -> set[str]:
    """Write a module's bytecode unless it is there, and return its module-level imports."""
    file, package = module
    cached = Path(importlib.util.cache_from_source(str(file)))
    if not is_current(file, cached):
        try:
            py_compile.compile(str(file), doraise=True)
        except (py_compile.PyCompileError, OSError):  # a template, or a file for another Python
            return set()
    code: CodeType = marshal.loads(cached.read_bytes()[HEADER_BYTES:])
    return imports_of(code, package, is_deep=False)


def is_current(file: Path, cached: Path) -> bool:
    """Tell whether `cached` is the bytecode of `file` as it is, by time and size, as Python tells."""
    try:
        with cached.open("rb") as stream:
            header = stream.read(HEADER_BYTES)
    except OSError:
        return False
    status = file.stat()
    wanted = (int(status.st_mtime) & 0xFFFFFFFF, status.st_size & 0xFFFFFFFF)
    has_magic = header[:4] == importlib.util.MAGIC_NUMBER
    found = (int.from_bytes(header[8:12], "little"), int.from_bytes(header[12:16], "little"))
    return has_magic and found == wanted


def imports_of(code: CodeType, package: str, *, is_deep: bool) -> set[str]:
    """Return the names that `code` imports, `a.b` for `from a import b` too; in functions if `is_deep`."""
    found: set[str] = set()
    constants: list[object] = [None, None]
    skipped_to, is_for_checkers = 0, False
    for instruction in dis.get_instructions(code):
        if is_for_checkers and "JUMP" in instruction.opname:
            skipped_to = instruction.argval  # over what stands below `if TYPE_CHECKING`
        is_for_checkers = instruction.argval == "TYPE_CHECKING"
        if instruction.offset < skipped_to:
            continue
        if instruction.opcode == LOAD_CONST:
            constants = [constants[-1], instruction.argval]
        elif instruction.opcode == IMPORT_NAME:
            level, names = constants
            base = instruction.argval
            if isinstance(level, int) and level:
                parents = package.split(".")[: len(package.split(".")) - level + 1]
                base = ".".join([*parents, *filter(None, [base])])
            found.add(base)
            found.update(f"{base}.{name}" for name in (names if isinstance(names, tuple) else ()))
    for inner in _inner_codes(code):
        if is_deep or not inner.co_flags & 0x0002:  # CO_NEWLOCALS: a function, not the body of a class
            found |= imports_of(inner, package, is_deep=is_deep)
    return found


def _inner_codes(code: CodeType) -> Iterator[CodeType]:
    return (constant for constant in code.co_consts if isinstance(constant, CodeType))


def files_of(site_packages: Path, name: str) -> Iterable[Path]:
    """Return the files that an import of `name` loads: of its packages, and its own."""
    folder = site_packages
    for part in name.split("."):
        if (file := folder / f"{part}.py").is_file():
            yield file
            return
        folder /= part
        if (file := folder / "__init__.py").is_file():
            yield file
        elif not folder.is_dir():
            return


def package_of(site_packages: Path, file: Path) -> str:
    """Return the package that a module's relative imports start from."""
    return ".".join(file.relative_to(site_packages).parent.parts)


if __name__ == "__main__":
    print(f"{main(Path(sys.argv[1]))} modules compiled")
