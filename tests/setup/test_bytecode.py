"""Modules that set-up compiles: the installed ones that asyncrl reaches by imports, and no others."""

import importlib.util
import os
from pathlib import Path

import bytecode
import pytest

SITE = {
    "vllm/__init__.py": "",
    "vllm/v1/engine/core.py": (
        "from __future__ import annotations\nfrom typing import TYPE_CHECKING\n"
        "from ..sample import logits, Sampler\nimport torch.nn\n"
        "if TYPE_CHECKING:\n    import checked\nelse:\n    import otherwise\n"
        "try:\n    import tried\nexcept ImportError:\n    import fallback\n"
        "class Core:\n    import in_class\ndef run():\n    import lazy\n"
    ),
    "vllm/v1/sample/__init__.py": "",
    "vllm/v1/sample/logits.py": "from . import nothing_there\n",
    "vllm/unused.py": "",
    "other.py": "",
    "torch/__init__.py": "",
    "torch/nn.py": "def broken(:\n",
    **{f"{name}.py": "" for name in ("checked", "otherwise", "tried", "fallback", "in_class", "lazy")},
}


def make_site(folder: Path) -> Path:
    for name, text in SITE.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.fixture(autouse=True)
def few_own_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set-up reads all modules of asyncrl, which takes seconds; none of them names what is sought here."""
    monkeypatch.setattr(bytecode, "OWN", ("weight_sync/memory",))


@pytest.fixture(autouse=True)
def no_fork_of_the_threads_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork of this process, which has threads of other tests, waits for ever for the locks they held."""
    monkeypatch.setattr(os, "fork", None)


def compiled(site: Path) -> set[str]:
    files = (path for path in site.rglob("*.py"))
    return {
        str(path.relative_to(site)) for path in files if Path(importlib.util.cache_from_source(path)).exists()
    }


def test_what_is_imported_at_load_is_compiled_and_nothing_else(tmp_path):
    site = make_site(tmp_path)
    bytecode.main(site)
    assert compiled(site) == {
        "vllm/__init__.py",
        "vllm/v1/engine/core.py",
        "vllm/v1/sample/__init__.py",
        "vllm/v1/sample/logits.py",
        "torch/__init__.py",
        "otherwise.py",
        "tried.py",
        "fallback.py",
        "in_class.py",
    }


def test_of_our_own_modules_the_imports_in_functions_count_too(tmp_path):
    file = tmp_path / "own.py"
    file.write_text("import a\ndef f():\n    from b.c import d\n")
    assert {"a", "b.c", "b.c.d"} <= bytecode.imports_of_own(file)


def test_bytecode_that_is_there_is_kept_and_old_one_is_made_anew(tmp_path):
    site = make_site(tmp_path)
    bytecode.main(site)
    file = site / "tried.py"
    cached = Path(importlib.util.cache_from_source(file))
    before = cached.stat().st_mtime_ns
    bytecode.main(site)
    assert cached.stat().st_mtime_ns == before
    file.write_text("import other\n")
    os.utime(file, (1, 1))
    bytecode.main(site)
    assert cached.stat().st_mtime_ns != before and "other.py" in compiled(site)
