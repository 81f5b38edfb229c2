"""Batches: who goes together, and whose deadline it is."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from rollout_service.rewards.score import RewardError, Score
from rollout_service.rewards.served.batches import Batches, Item, Outcome


def test_what_comes_together_goes_together_and_no_more_batches_than_allowed_run_at_once():
    sizes, running, most = [], 0, 0

    async def run(items: Sequence[Item]) -> Sequence[Outcome]:
        nonlocal running, most
        sizes.append(len(items))
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1
        return [Score(float(item["row"])) for item in items]

    async def work() -> list[Score]:
        batches = Batches(run, max_items=4, wait_s=0.01, max_running=2)
        try:
            return await asyncio.gather(*(batches.value({"row": row}) for row in range(18)))
        finally:
            await batches.close()

    assert asyncio.run(work()) == [Score(float(row)) for row in range(18)]
    assert (max(sizes), sum(sizes), most) == (4, 18, 2)


def test_the_end_of_the_batches_ends_those_that_run_and_those_that_wait():
    async def hang(items: Sequence[Item]) -> Sequence[Outcome]:
        await asyncio.sleep(3600)
        return []

    async def work() -> list[object]:
        batches = Batches(hang, max_items=1, wait_s=0.0, max_running=1)
        calls = [asyncio.create_task(batches.value({"row": row})) for row in range(3)]
        await asyncio.sleep(0.01)
        await batches.close()
        return await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 20.0)

    assert [type(one) for one in asyncio.run(work())] == [asyncio.CancelledError] * 3


def test_an_error_of_a_batch_is_that_of_each_of_its_answers_and_the_next_batch_is_well():
    async def run(items: Sequence[Item]) -> Sequence[Outcome]:
        if items[0]["row"] == 0:
            raise RewardError("out of order", kind="died")
        return [Score(1.0)] * len(items)

    async def work() -> None:
        batches = Batches(run, max_items=2, wait_s=0.01, max_running=1)
        first, second, third = await asyncio.gather(
            *(batches.value({"row": row}) for row in range(3)), return_exceptions=True
        )
        assert isinstance(first, RewardError) and isinstance(second, RewardError)
        assert (first.kind, third) == ("died", Score(1.0))
        given_up = asyncio.create_task(batches.value({"row": 5}))
        await asyncio.sleep(0)
        given_up.cancel()
        assert await batches.value({"row": 6}) == Score(1.0)
        await batches.close()
        with pytest.raises(asyncio.CancelledError):
            await given_up

    asyncio.run(work())


def test_a_defect_in_a_batch_is_told_to_each_of_its_answers():
    async def run(items: Sequence[Item]) -> Sequence[Outcome]:
        raise OSError("no such device")

    async def work() -> list[object]:
        batches = Batches(run, max_items=2, wait_s=0.01, max_running=1)
        calls = asyncio.gather(*(batches.value({"row": row}) for row in range(2)), return_exceptions=True)
        try:
            return await asyncio.wait_for(calls, 20.0)
        finally:
            await batches.close()

    assert [str(one) for one in asyncio.run(work())] == ["OSError: no such device"] * 2
