"""Shares of a batch that several ranks train: one of them fetches it, and all have it."""

from __future__ import annotations

import queue
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from asyncrl.core.experience import Group, encode_group
from learner.batch_fetcher import SharedFetcher
from tests.learner.parts.samples import make_groups


class ThreadShare:
    """One of some ranks that are threads of this process, as `learner.ranks` lets them speak."""

    def __init__(self, rank: int, channels: Sequence[queue.SimpleQueue[bytes]]) -> None:
        self.is_leader, self.world_size = rank == 0, len(channels)
        self._rank, self._channels = rank, channels

    def share_bytes(self, data: bytes | None) -> bytes:
        for channel in self._channels if data is not None else ():
            channel.put(data)
        return self._channels[self._rank].get(timeout=60.0)


class CountedSource:
    """Groups in memory, and how often they were asked for."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self.groups, self.asked = groups, list[tuple[int, list[int]]]()

    def fetch(self, token: int, tickets: Sequence[int]) -> list[Group]:
        self.asked.append((token, list(tickets)))
        return [group for group in self.groups if group.ticket in tickets]


def frames_of(groups: Sequence[Group]) -> list[list[bytes]]:
    return [[bytes(frame) for frame in encode_group(group)] for group in groups]


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("num_groups", [0, 1, 5])
def test_the_first_rank_of_a_share_fetches_it_and_all_have_it(world_size: int, num_groups: int) -> None:
    groups = make_groups(num_groups, versions=(1, 2)) if num_groups else []
    channels = [queue.SimpleQueue[bytes]() for _ in range(world_size)]
    sources = [CountedSource(groups) for _ in range(world_size)]
    fetchers = [SharedFetcher(sources[rank], ThreadShare(rank, channels)) for rank in range(world_size)]
    tickets = [group.ticket for group in groups]
    with ThreadPoolExecutor() as pool:
        found = list(pool.map(lambda fetcher: fetcher.fetch(7, tickets), fetchers))
    assert [source.asked for source in sources] == [[(7, tickets)]] + [[]] * (world_size - 1)
    assert [frames_of(each) for each in found] == [frames_of(groups)] * world_size
