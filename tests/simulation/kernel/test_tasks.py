"""Tasks of simulated processes: each rule is a trap that a simulator of this kind can fall into."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable, Iterator

import pytest

from tests.simulation.kernel.network import Wires
from tests.simulation.kernel.runtime import SimRuntime
from tests.simulation.kernel.watchdog import watched
from tests.simulation.kernel.world import TRACERS, Process, Stuck, World


@pytest.fixture
def world() -> Iterator[World]:
    world = World("test")
    yield world
    if not world.is_over:
        world.end()


def runtime_of(world: World, name: str = "one") -> SimRuntime:
    return SimRuntime(world.process(name), Wires(world))


def run_in(runtime: SimRuntime, *works: Callable[[], None]) -> Process:
    for number, work in enumerate(works):
        runtime.spawn(f"work-{number}", work)
    return runtime.process


def test_a_killed_process_is_not_unwound_before_the_world_ends(world: World) -> None:
    runtime, said = runtime_of(world), []

    def work() -> None:
        try:
            runtime.sleep(10.0)
        finally:
            said.append("unwound")

    process = run_in(runtime, work)
    world.after(1.0, process.kill)
    world.run(20.0)
    assert said == []
    world.end()
    assert said == ["unwound"]


def test_a_process_that_is_killed_at_a_call_of_its_runtime_does_nothing_after_it(world: World) -> None:
    runtime, said = runtime_of(world), []
    event = runtime.event()

    def work() -> None:
        for number in range(5):
            said.append(number)
            event.set()

    process = run_in(runtime, work)
    process.fuse = 2  # after which calls it dies at the third
    world.run(1.0)
    assert said == [0, 1, 2] and not process.is_alive


def test_a_late_deadline_does_not_end_the_next_wait(world: World) -> None:
    runtime, heard = runtime_of(world), []
    first, second = runtime.event(), runtime.event()

    def work() -> None:
        heard.append(first.wait(1.0))
        heard.append(second.wait(5.0))
        heard.append(world.now)

    run_in(runtime, work)
    world.after(0.5, first.set)
    world.after(3.0, second.set)
    world.run(10.0)
    assert heard[:2] == [True, True] and heard[2] == pytest.approx(3.0, abs=0.001)


def test_a_process_that_stands_still_goes_on_with_what_was_due_meanwhile(world: World) -> None:
    runtime, woken = runtime_of(world), []

    def work() -> None:
        runtime.sleep(1.0)
        woken.append(world.now)

    process = run_in(runtime, work)
    world.after(0.5, process.freeze)
    world.after(4.0, process.thaw)
    world.run(10.0)
    assert woken == [pytest.approx(4.0, abs=0.001)]


def test_loops_of_two_processes_do_not_take_each_other_for_the_running_one(world: World) -> None:
    seen: dict[str, list[float]] = {"one": [], "two": []}

    async def live(name: str) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(3):
            await asyncio.sleep(1.0)
            assert asyncio.get_running_loop() is loop
            seen[name].append(round(world.now, 2))

    for name in seen:
        runtime = runtime_of(world, name)
        run_in(runtime, lambda runtime=runtime, name=name: runtime.run_async(live(name)))
    world.run(10.0)
    assert seen == {"one": [1.0, 2.0, 3.0], "two": [1.0, 2.0, 3.0]} and world.crashes == []


def test_a_set_of_tasks_has_one_order_wherever_they_lie_in_memory() -> None:
    def order(num_bytes: int) -> list[str]:
        world, names = World("test"), []
        runtime, kept = runtime_of(world), []

        async def one() -> None:
            await asyncio.sleep(1.0)

        async def live() -> None:
            tasks = set()
            for number in range(12):
                kept.append(bytearray(num_bytes))
                tasks.add(asyncio.create_task(one(), name=str(number)))
            names.extend(task.get_name() for task in tasks)
            await asyncio.wait(tasks)

        run_in(runtime, lambda: runtime.run_async(live()))
        world.run(5.0)
        world.end()
        return names

    assert order(1) == order(5000) == order(20_000) and len(order(1)) == 12


def test_a_loop_ends_what_its_main_left_behind_and_gives_its_result(world: World) -> None:
    runtime, said = runtime_of(world), []

    async def forever() -> None:
        try:
            await asyncio.sleep(1e9)
        finally:
            said.append("cancelled")

    async def main() -> int:
        asyncio.create_task(forever())  # noqa: RUF006
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(2.0):
                await asyncio.Event().wait()
        return await asyncio.to_thread(lambda: 7)

    run_in(runtime, lambda: said.append(runtime.run_async(main())))
    world.run(10.0)
    assert said == ["cancelled", 7]


def test_a_task_that_never_waits_is_found_and_no_code_of_production_can_take_its_error(world: World) -> None:
    def work() -> None:
        while True:
            try:
                sum(range(1000))
            except Exception:
                continue

    run_in(runtime_of(world, "spinner"), work)
    with pytest.raises(Stuck, match="spinner#1001/work-0 never waits"), watched(world, look_s=0.1):
        world.run(1.0)


def test_a_timer_that_strikes_twice_in_a_row_finds_no_task_that_never_waits(world: World) -> None:
    def strike() -> None:
        for _ in range(3):
            signal.raise_signal(signal.SIGVTALRM)
        runtime.sleep(1.0)
        done.append(True)

    done: list[bool] = []
    runtime = runtime_of(world)
    run_in(runtime, strike)
    with watched(world, look_s=60.0):
        world.run(2.0)
    assert done


def test_a_tracer_is_set_in_each_task(world: World) -> None:
    found: list[str] = []

    def trace(frame, event, arg):  # type: ignore[no-untyped-def]
        found.append(frame.f_code.co_name)

    def a_function_of_the_task() -> None:
        runtime.sleep(1.0)

    runtime, before = runtime_of(world), sys.gettrace()
    TRACERS.append(trace)
    try:
        run_in(runtime, a_function_of_the_task)
        world.run(2.0)
    finally:
        TRACERS.remove(trace)
        sys.settrace(before)
    assert "a_function_of_the_task" in found


def test_locks_queues_and_joins_wait_in_virtual_time(world: World) -> None:
    runtime, said = runtime_of(world), []
    lock, queue = runtime.lock(), runtime.queue()

    def hold() -> None:
        with lock:
            runtime.sleep(2.0)
        queue.put("let go")

    def ask() -> None:
        runtime.sleep(1.0)
        said.append(lock.acquire(timeout=0.5))
        said.append(queue.get())
        other = runtime.spawn("other", lambda: runtime.sleep(1.0))
        other.join(0.2)
        said.append(other.is_alive())
        other.join()
        said.append(round(world.now, 1))

    run_in(runtime, hold, ask)
    world.run(10.0)
    assert said == [False, "let go", True, 3.0]


def test_hosts_have_clocks_of_their_own_and_processes_of_a_host_share_one(world: World) -> None:
    wires = Wires(world)
    first, second, other = (
        SimRuntime(world.process(name, host), wires)
        for name, host in (("a", "left"), ("b", "left"), ("c", "right"))
    )
    assert first.now() == second.now() != other.now()
    assert first.wall_ns() == other.wall_ns() and first.pid != second.pid and first.new_id() != other.new_id()
