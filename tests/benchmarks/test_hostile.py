"""The verdict of the benchmark of hostile input, and that its attacks are what they are called."""

from __future__ import annotations

import pytest

from asyncrl.core import wire
from asyncrl.core.errors import WireError
from asyncrl.core.experience import decode_group
from benchmarks.buffer import hostile


@pytest.mark.parametrize(
    ("share", "slowdown", "is_met"), [(0.96, 1.9, True), (0.94, 1.9, False), (0.96, 2.1, False)]
)
def test_a_share_below_the_target_or_others_slowed_down_is_a_miss(
    share: float, slowdown: float, is_met: bool
) -> None:
    assert hostile.judge({"share": share, "slowdown_by_key_holder": slowdown})[0] is is_met


def test_the_attacks_are_malformed_deep_and_late() -> None:
    attacker = hostile.Attacker("tcp://127.0.0.1:1")
    try:
        for name in ("malformed", "deep"):
            with pytest.raises(WireError):
                wire.unpack_header(attacker.messages[name][0], version=wire.RPC_VERSION)
        header, *frames = attacker.messages["late_push"]
        assert wire.unpack_header(header, version=wire.RPC_VERSION)["op"] == "push"
        assert decode_group(frames).ticket == 1
    finally:
        attacker.close()


def test_the_interval_of_a_median_holds_it_and_narrows_with_more_values() -> None:
    few, many = [1.0, 0.8, 1.2, 0.9, 1.1], [0.8 + 0.4 * number / 79 for number in range(80)]
    assert hostile.interval_of_median(few) == (0.8, 1.2)
    low, high = hostile.interval_of_median(many)
    assert low < 1.0 < high < 1.06
