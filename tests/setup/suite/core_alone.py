"""A plugin of pytest for a Python without the packages of a run: a test that imports one of them is skipped.

python -m pytest -p tests.setup.suite.core_alone tests/core
"""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

import pytest

OF_A_RUN = ("megatron", "ray", "torch", "transformers", "vllm")


class Absent:
    """A finder that skips whatever imports one of its packages, a test or a whole file."""

    def __init__(self, packages: frozenset[str]) -> None:
        self._packages = packages

    def find_spec(self, name: str, path: object = None, target: ModuleType | None = None) -> None:
        if name.partition(".")[0] in self._packages:
            raise pytest.skip.Exception(f"needs {name}, not installed here", allow_module_level=True)


def absent_packages() -> frozenset[str]:
    """Return those of `OF_A_RUN` that are not installed here."""
    return frozenset(name for name in OF_A_RUN if importlib.util.find_spec(name) is None)


needs_all = pytest.mark.skipif(bool(absent_packages()), reason="needs all packages of a run")


def pytest_configure() -> None:
    sys.meta_path.insert(0, Absent(absent_packages()))
