"""Experts that each token was sent to, from vLLM's engine core to the answer that has the token.

vLLM 0.32 returns them by `enable_return_routed_experts`, with its second model runner alone, which needs
Triton. Here are the two ends for the first one, by the classes that vLLM lets an engine name: a worker that
notes what the routers of a step chose, and a scheduler that hands each row out once. Row n is of the token at
position n. Invariant: it is of the first pass over that token, from which the next one was sampled; a pass
that recomputes it after a swap changes nothing. A token that was found in the prefix cache has no row.

Shapes: N tokens of a step or of a request, L layers, K experts chosen by each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from vllm.distributed.aux_output_connector.connector import AuxRequestOutput
from vllm.model_executor.layers.fused_moe.routed_experts_capturer import (
    RoutedExpertsCapturer,
    bind_routed_experts_capturer,
)
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker.cpu_worker import CPUWorker

from asyncrl.core.experts import ITEM_BYTES, Rows, item_bytes, no_rows

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


class RoutedWorker(CPUWorker):
    """A worker on CPU whose steps say which experts each token was sent to; layers without any say none."""

    _capturer: RoutedExpertsCapturer
    _step: dict[str, AuxRequestOutput]

    def load_model(self, **options: object) -> None:
        super().load_model(**options)
        most_tokens = self.vllm_config.scheduler_config.max_num_batched_tokens
        self._capturer = RoutedExpertsCapturer(most_tokens, self.vllm_config)
        self._capturer.device_buffer.fill_(-1)
        bind_routed_experts_capturer(self.model_runner.get_model(), self._capturer)

    def execute_model(self, scheduler_output: SchedulerOutput) -> object:
        result = super().execute_model(scheduler_output)
        self._step = self._rows_of(scheduler_output)
        return self._told(result)

    def sample_tokens(self, grammar_output: object) -> object:
        return self._told(super().sample_tokens(grammar_output))

    def _told(self, result: object) -> object:
        if isinstance(result, ModelRunnerOutput):
            result.aux_output_connector_output = self._step
        return result

    def _rows_of(self, step: SchedulerOutput) -> dict[str, AuxRequestOutput]:
        """Return the rows [N, L, K] of each request of the step, and the position of the first."""
        dtype = ITEM_BYTES[item_bytes(self.model_config.get_num_experts())]
        rows = self._capturer.device_buffer[: step.total_num_scheduled_tokens].numpy().astype(dtype)
        found, start, batch = {}, 0, self.model_runner.input_batch
        for index, request_id in enumerate(batch.req_ids if step.total_num_scheduled_tokens else ()):
            end = start + step.num_scheduled_tokens[request_id]
            found[request_id] = AuxRequestOutput(int(batch.num_computed_tokens_cpu[index]), rows[start:end])
            start = end
        return found


class RouteBook:
    """Rows of the requests of one scheduler, in the place of vLLM's own connector; see the module."""

    def __init__(self) -> None:
        self._num_taken: dict[str, int] = {}
        self._waiting: dict[str, list[Rows]] = {}

    def take_in(self, request_id: str, start: int, rows: Rows) -> None:
        """Take in the rows of one step, from position `start` on; those before the newest are known."""
        known = self._num_taken.setdefault(request_id, 0)
        waiting = self._waiting.setdefault(request_id, [])
        if start > known:
            waiting.append(no_rows(start - known, rows))
        waiting.append(rows[max(0, known - start) :])
        self._num_taken[request_id] = max(known, start + len(rows))

    def take_output(self, request: Request, output: object) -> Rows | None:
        """Return the rows that no earlier output of the request had."""
        waiting = self._waiting.pop(request.request_id, [])
        return np.concatenate(waiting) if waiting else None

    def request_finished(self, request: Request) -> None:
        """Forget a request that has ended; one that only lost its KV cache goes on."""
        if request.is_finished():
            self._num_taken.pop(request.request_id, None)
            self._waiting.pop(request.request_id, None)

    def build_connector_meta(self, output: object, requests: object) -> None:
        """Tell the worker nothing."""

    def reset(self) -> None:
        """Keep all rows: they are not of the prefix cache that was reset."""


class RoutedScheduler(Scheduler):
    """A scheduler whose outputs have the rows of the tokens that they add."""

    def __init__(self, *arguments: object, **options: object) -> None:
        super().__init__(*arguments, **options)
        assert not self.scheduler_config.async_scheduling, "a step's tokens are known before the next one"
        self.aux_output_connector = RouteBook()

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> object:
        for request_id, told in (model_runner_output.aux_output_connector_output or {}).items():
            if request_id in self.requests:
                self.aux_output_connector.take_in(request_id, told.token_start, told.rows)
        return super().update_from_output(scheduler_output, model_runner_output)
