"""Protocols of the vLLM objects that the adapter uses; vLLM itself is not type-checked.

Owns no behaviour: `engine.features` lists the features that a vLLM must have.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NotRequired, Protocol, TypedDict

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    from asyncrl.core.experts import Rows


class TokenPrompt(TypedDict):
    """A prompt by its ids. `cache_salt` keeps its prefixes apart from those of other salts."""

    type: str
    prompt_token_ids: list[int]
    cache_salt: NotRequired[str]


class Logprob(Protocol):
    """The log-prob of one entry of the vocabulary."""

    logprob: float


class VersionSpan(Protocol):
    """The tokens `start` to `end` of an answer, and the label of the weights that sampled them."""

    version: str
    start: int
    end: int


class CompletionOutput(Protocol):
    """One answer of a request, or what is new of it."""

    token_ids: Sequence[int]
    logprobs: Sequence[Mapping[int, Logprob]] | None
    text: str
    finish_reason: str | None
    stop_reason: int | str | None
    weight_versions: Sequence[VersionSpan] | None
    routed_experts: Rows | None


class RequestOutput(Protocol):
    """Output of a request so far."""

    outputs: Sequence[CompletionOutput]
    finished: bool


class Renderer(Protocol):
    """Renderer of requests to prompts."""

    tokenizer: PreTrainedTokenizerBase


class AskedSampling(Protocol):
    """Part of a client's SamplingParams about the end and the form of an answer."""

    output_kind: object
    stop: Iterable[str] | None
    stop_token_ids: Iterable[int] | None
    logprobs: int | None
    max_tokens: int | None
    skip_special_tokens: bool
    spaces_between_special_tokens: bool


class ServingClient(Protocol):
    """An engine's client, as vLLM's serving classes and the gateway use it."""

    model_config: object
    vllm_config: object
    renderer: Renderer
    input_processor: object

    @property
    def errored(self) -> bool: ...

    @property
    def dead_error(self) -> BaseException: ...

    def check_admission(self, n: int = 1) -> None:
        """Raise if the queue is full."""

    def generate(
        self, prompt: TokenPrompt, sampling_params: object, request_id: str, /
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield what comes of a request."""

    async def abort(self, request_id: list[str], /) -> None:
        """End requests."""

    def shutdown(self, timeout: float | None = None) -> None:
        """End the engine core."""


class AsyncLLM(ServingClient, Protocol):
    """The client of an engine, with what steers it."""

    def update_weight_version(self, version: str, /) -> Awaitable[object]: ...

    def pause_generation(self, *, mode: str, clear_cache: bool) -> Awaitable[object]: ...

    def resume_generation(self) -> Awaitable[object]: ...

    def start_weight_update(self) -> Awaitable[object]: ...

    def update_weights(self, request: object, /) -> Awaitable[object]: ...

    def finish_weight_update(self) -> Awaitable[object]: ...

    def collective_rpc(self, method: str, /) -> Awaitable[object]: ...

    logger_manager: LoggerManager


class LoggerManager(Protocol):
    """The loggers of a client, to which it hands the statistics of each step."""

    stat_loggers: list[object]


class SchedulerStats(Protocol):
    """Statistics of the scheduler after a step."""

    num_running_reqs: int
    num_waiting_reqs: int
    kv_cache_usage: float


class PromptTokenStats(Protocol):
    """Prompt tokens that were prefilled or found in the cache."""

    total: int
    local_cache_hit: int


class IterationStats(Protocol):
    """Statistics of the requests of a step."""

    num_preempted_reqs: int
    prompt_token_stats: PromptTokenStats


class HasModules(Protocol):
    """A model, as far as its modules go."""

    def named_modules(self) -> Iterator[tuple[str, torch.nn.Module]]: ...

    def named_parameters(
        self, *, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.nn.Parameter]]: ...

    def named_buffers(self, *, remove_duplicate: bool = True) -> Iterator[tuple[str, torch.Tensor]]: ...


class LoadableModel(HasModules, Protocol):
    """A model that takes weights by name."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], /) -> object: ...


class ScoringModel(Protocol):
    """A model that gives logits."""

    def named_modules(self) -> Iterator[tuple[str, torch.nn.Module]]: ...

    def parameters(self) -> Iterator[torch.nn.Parameter]: ...

    def __call__(self, **inputs: object) -> torch.Tensor: ...

    def compute_logits(self, hidden_TE: torch.Tensor, /) -> torch.Tensor | None: ...


class AttentionBackend(Protocol):
    """The computing part of an attention layer."""

    scale: float
    forward: Callable[..., torch.Tensor]


class AttentionLayer(Protocol):
    """An attention layer."""

    impl: AttentionBackend
    attn_type: str


class LoadedParameter(Protocol):
    """A parameter with the function that fills it."""

    weight_loader: Callable[..., object]


class CachedBlock(Protocol):
    """A block of the KV cache, with the hash of the tokens up to its end while others can find it."""

    def reset_hash(self) -> None:
        """Forget the hash."""


class BlockPool(Protocol):
    """The blocks of an engine core, with the index of those that hold prefixes."""

    blocks: Sequence[CachedBlock]
    cached_block_hash_to_block: object
    cached_block_hashes_by_block: dict[int, object]


class CacheManager(Protocol):
    """The KV cache of an engine core."""

    block_pool: BlockPool


class Scheduler(Protocol):
    """The scheduler of an engine core."""

    kv_cache_manager: CacheManager
