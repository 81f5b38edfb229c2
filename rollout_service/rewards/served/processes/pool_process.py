"""The process of a pooled reward: loads one function, then scores one answer after the other.

It must never import what the replica imports: it starts in a fraction of a second and stays small.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from asyncrl.core.errors import ConfigError
from asyncrl.core.variants import function
from rollout_service.rewards.calling import BoundFunction, ScoreFunction
from rollout_service.rewards.score import Answer, RewardError
from rollout_service.rewards.served.frames import ParentLink
from rollout_service.rewards.served.messages import FunctionSettings, Judged, PlainAnswer
from rollout_service.user_file import import_file


@dataclass(frozen=True)
class PlainTask:
    """A `Task` out of plain values."""

    row: int
    content: str | list[dict[str, object]]
    ground_truth: object
    data_source: str
    extra_info: Mapping[str, object]


def main() -> None:
    """Serve until the parent leaves."""
    link = ParentLink()
    settings = msgspec.convert(link.receive(), FunctionSettings)
    try:
        bound = load_function(settings.name, settings.function, settings.arguments)
    except ConfigError as error:
        link.send({"refused": str(error)})
        return
    link.send({})
    while True:
        judged = answer_request(bound, msgspec.convert(link.receive(), PlainAnswer))
        link.send(msgspec.structs.asdict(judged))


def answer_request(bound: BoundFunction, request: PlainAnswer) -> Judged:
    """Return the function's number, or why there is none."""
    told = (request["row"], request["prompt"], request["ground_truth"], request["data_source"])
    task = PlainTask(*told, request["extra_info"])
    try:
        answer = Answer(task, request["response"], request["finish_reason"], request["num_tokens"])
        score = bound(answer)
        return Judged(value=score.value, reason=score.reason)
    except RewardError as error:
        return Judged(error=error.message, kind=error.kind, reason=error.reason)


def load_function(name: str, named: str, arguments: Mapping[str, object]) -> BoundFunction:
    """Return `file.py:name` or `module:name`. Raises ConfigError: there is none, or it takes less."""
    file, _, attribute = named.rpartition(":")
    if file.endswith(".py"):
        return BoundFunction(name, load_from_file(Path(file), attribute), arguments)
    return BoundFunction(name, function(named), arguments, is_closed=True)


def load_from_file(path: Path, attribute: str) -> ScoreFunction:
    """Return a function of a Python file. Raises ConfigError."""
    found: object = getattr(import_file(path, "the reward file"), attribute, None)
    if not callable(found):
        raise ConfigError(f"{path} has no function '{attribute}'")
    return found


if __name__ == "__main__":
    main()
