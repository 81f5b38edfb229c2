"""`asyncrl bench`: every command has a module, and says so where it is not installed."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from asyncrl.cli.commands.bench import BENCHMARKS, Benchmark
from tests.cli.commands.calling import asyncrl


def test_every_benchmark_has_a_module_of_its_own() -> None:
    assert all(find_spec(f"benchmarks.{one.module}") is not None for one in BENCHMARKS.values())


def test_a_benchmark_that_is_not_installed_asks_for_a_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BENCHMARKS, "buffer", Benchmark("absent.throughput", ""))
    done = asyncrl("bench", "buffer", "--quick")
    assert done.code == 2
    assert "asyncrl bench buffer needs a checkout of asyncrl" in done.err
