"""vLLM's front end over SGLang: what an answer of the child becomes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rollout_service.engine.sglang.front_end import _outputs_of
from rollout_service.engine.sglang.messages import Generated

REQUEST: Any = SimpleNamespace(
    request_id="7.1.0", sampling_params=SimpleNamespace(eos_token_id=2, stop_token_ids=())
)


def answer(logprobs: list[float], spans: list[tuple[int, int, int]]) -> Generated:
    ids, values = np.asarray([5, 6], np.int32), np.asarray(logprobs, np.float32)
    return Generated(1, ids.tobytes(), values.tobytes(), spans, "stop")


def test_tokens_come_with_the_version_and_the_log_prob_of_each():
    found = [*_outputs_of(REQUEST, answer([-1.0, -2.0], [(3, 0, 1), (4, 1, 2)]))]
    assert [(one.outputs[0].new_token_ids, one.weight_version) for one in found] == [([5], "3"), ([6], "4")]
    assert [one.outputs[0].new_logprobs.logprobs.tolist() for one in found] == [[[-1.0]], [[-2.0]]]
    assert [one.outputs[0].finish_reason is None for one in found] == [True, False]


@pytest.mark.parametrize(
    ("logprobs", "spans"), [([-1.0], [(3, 0, 2)]), ([-1.0, -2.0], [(3, 0, 1)]), ([-1.0, -2.0], [])]
)
def test_an_answer_without_a_version_or_log_prob_of_each_token_ends_as_an_error(
    logprobs: list[float], spans: list[tuple[int, int, int]]
):
    (found,) = _outputs_of(REQUEST, answer(logprobs, spans))
    (output,) = found.outputs
    assert (output.new_token_ids, found.weight_version) == ([], None)
    assert output.finish_reason.name == "ERROR"
