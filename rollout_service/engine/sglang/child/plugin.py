"""asyncrl's plugin of SGLang, called in each of its processes: loads, whole aborts, versions, CPU seeds.

Invariant: an SGLang that no adapter of asyncrl has started is left as it is.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from rollout_service.engine.sglang.messages import LOAD_REQUEST

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.scheduler_components.output_streamer import _GenerationStreamAccumulator

ON_CPU = "SGLANG_USE_CPU_ENGINE"
ABORT = "sglang.srt.managers.scheduler.Scheduler.send_abort_output"
STREAM = "sglang.srt.managers.scheduler_components.output_streamer._GenerationStreamAccumulator.accept"
UPDATE = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"


def register() -> None:
    """Have SGLang's load from disk load a staged version; on a CPU make its deterministic mode run."""
    if LOAD_REQUEST not in os.environ:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from rollout_service.engine.sglang.child.loading import load_staged

    HookRegistry.register(ABORT, _abort_with_tokens, HookType.AROUND)
    HookRegistry.register(STREAM, _accept_with_versions, HookType.AROUND)
    HookRegistry.register(f"{UPDATE}.update_weights_from_disk", load_staged, HookType.AROUND)
    if os.environ.get(ON_CPU) == "1":
        _allow_seeds_on_cpu()


def _abort_with_tokens(
    abort: Callable[[Scheduler, object, Req], None], scheduler: Scheduler, message: object, request: Req
) -> None:
    """End a request that was retracted, as one that runs is ended: else its last tokens are lost."""
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    if request.output_ids and not request.finished():
        request.finished_reason = FINISH_ABORT()
        scheduler.output_streamer.stream_output([request], request.return_logprob)
    else:
        abort(scheduler, message, request)


def _accept_with_versions(
    accept: Callable[..., None], parts: _GenerationStreamAccumulator, *, req: Req
) -> None:
    """Label each part of a streamed request; SGLang tells the versions at its end alone."""
    from sglang.srt.utils.weight_versions import compute_weight_version_spans

    accept(parts, req=req)
    if req.stream and parts.output_reqs and parts.output_reqs[-1] is req:
        parts.weight_versions[-1] = compute_weight_version_spans(
            req.weight_version_events, parts.current_weight_version, len(req.output_ids_through_stop)
        )


def _allow_seeds_on_cpu() -> None:
    """Without deterministic mode SGLang ignores a request's seed; with it, it asks for Triton's operators."""
    import sglang.srt.batch_invariant_ops as operators
    from sglang.srt.server_args import add_deterministic_attention_backend_choices

    add_deterministic_attention_backend_choices(["torch_native"])
    operators.enable_batch_invariant_mode = lambda *_args, **_options: None
