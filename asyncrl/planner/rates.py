"""Speeds of the parts: the input of the simulation (pure).

Owns no measurement: `asyncrl bench calibrate` takes rates, `hardware` assumes them. Units in names.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from asyncrl.core.errors import ConfigError

ASSUMED = "assumed, not measured"
"""Ends the source of rates that nobody has measured."""


@dataclass(frozen=True)
class Rates:
    """Seconds and tokens per second of every part.

    Attributes:
        decode: (running requests, tokens/s of the replica), rising in requests; between two points the
            rate of one request is interpolated, before the first it is that of the first, and beyond the last
            the replica's tokens/s stay.
        prefill_s_per_token: The replica stands still for so long per prompt token of a request that begins.
        step_s, step_s_per_token: A learner step is `step_s + step_s_per_token * tokens`, prompts included.
        part_s: More, for every part but the last of a batch that comes in parts.
        publish_s: The learner stands still for it with every version.
        transfer_s: Of a version to all receivers of a round. swap_s: A replica stands still to load one.
        version_bytes: Size of a version, by which deadlines of weight sync grow; 0 where it is unknown.
        checkpoint_s: The learner stands still for it with every checkpoint, while its state is copied to the
            host; checkpoint_write_s: from there until it is written, beside training.
        buffer_op_s: Of the buffer's one thread, per request.
        rpc_s: One message.
        start_s: Of a replica, from its start to its first lease but for the weights.
        group_overhead_s: From the last token of a group to its place in the buffer.
        source: Where the figures come from.
    """

    decode: tuple[tuple[float, float], ...] = ((1.0, 50.0), (64.0, 2000.0))
    prefill_s_per_token: float = 0.0
    step_s: float = 0.1
    step_s_per_token: float = 1e-4
    part_s: float = 0.0
    publish_s: float = 0.01
    transfer_s: float = 0.1
    swap_s: float = 0.05
    version_bytes: float = 0.0
    checkpoint_s: float = 0.0
    checkpoint_write_s: float = 0.0
    buffer_op_s: float = 5e-5
    rpc_s: float = 5e-4
    start_s: float = 0.0
    group_overhead_s: float = 0.0
    source: str = "made up"
    notes: Mapping[str, str] = field(default_factory=dict)

    def token_rate(self, num_running: float) -> float:
        """Return tokens/s of one request while `num_running` run on its replica."""
        points = self.decode
        at = bisect.bisect_left(points, (num_running, 0.0))
        if at == 0:
            return points[0][1] / points[0][0]
        if at == len(points):
            return points[-1][1] / max(num_running, points[-1][0])
        (left, slow), (right, fast) = points[at - 1], points[at]
        share = (num_running - left) / (right - left)
        return (1 - share) * slow / left + share * fast / right

    def learner_part_s(self, num_tokens: float, is_last: bool) -> float:
        """Return the seconds of a step on one part of its batch, prompts included, without the publish."""
        return (self.step_s if is_last else self.part_s) + self.step_s_per_token * num_tokens

    def as_values(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self) | {"decode": [list(point) for point in self.decode], "notes": dict(self.notes)}

    @staticmethod
    def of_values(values: Mapping[str, Any]) -> Rates:
        """Return the rates that `as_values` gave.

        Raises:
            ConfigError: The values are none.
        """
        try:
            decode = tuple(sorted((float(n), float(rate)) for n, rate in values["decode"]))
            found = Rates(**{**values, "decode": decode})
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"these are no rates: {error}", hint="'asyncrl bench calibrate' writes some"
            ) from error
        for name in sorted(NUMBERS):
            if not _is_rate(value := getattr(found, name)):
                raise ConfigError(f"rates.{name} must be a finite number >= 0, not {value!r}")
        if not decode or any(not (1 <= n < math.inf and 0 < rate < math.inf) for n, rate in decode):
            raise ConfigError("rates.decode needs pairs of running requests (>= 1) and tokens/s (> 0)")
        return found


NUMBERS = frozenset(name for name, value in vars(Rates()).items() if isinstance(value, float))


def _is_rate(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf
