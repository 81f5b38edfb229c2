"""The process of a pooled reward: loads one function, then scores one answer after the other.

It must never import what the replica imports: it starts in a fraction of a second and stays small.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from asyncrl.core.errors import ConfigError
from rollout_service.rewards.calling import BoundFunction, ScoreFunction
from rollout_service.rewards.matching import score_format
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
        return Judged(value=bound(answer))
    except RewardError as error:
        return Judged(error=error.message, kind=error.kind)


def load_function(name: str, function: str, arguments: Mapping[str, object]) -> BoundFunction:
    """Return the function that `function` names. Raises ConfigError: there is none, or it takes less."""
    if function == "format":
        return BoundFunction(name, score_format, arguments, is_closed=True)
    if function == "math_verify":
        return BoundFunction(name, load_math_verify(), arguments, is_closed=True)
    file, _, attribute = function.rpartition(":")
    return BoundFunction(name, load_from_file(Path(file), attribute), arguments)


def load_from_file(path: Path, attribute: str) -> ScoreFunction:
    """Return a function of a Python file. Raises ConfigError."""
    found: object = getattr(import_file(path, "the reward file"), attribute, None)
    if not callable(found):
        raise ConfigError(f"{path} has no function '{attribute}'")
    return found


def load_math_verify() -> Callable[..., float]:
    """Return `score(response, ground_truth)`: 1 if the answer in the response equals the gold, else 0.

    The answer is the last boxed one, else what the library finds: LaTeX, then plain numbers.

    Raises:
        ConfigError: The library is not installed.
    """
    try:
        from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
    except ImportError as error:
        raise ConfigError(
            "the reward 'math_verify' needs the package math-verify", hint="Install it, or use 'math'"
        ) from error
    of_gold = [LatexExtractionConfig()]
    of_answer = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]

    def score_math_verify(response: str, ground_truth: object, **extra: object) -> float:
        gold = parse(f"\\boxed{{{ground_truth}}}", extraction_config=of_gold)
        if not gold:
            raise ValueError(f"the ground truth {ground_truth!r} is no mathematics")
        return float(verify(gold, parse(response, extraction_config=of_answer)))

    return score_math_verify


if __name__ == "__main__":
    main()
