"""Variants that a configuration names: facts of estimators, losses, rewards, journals, engines, backends.

A record stands beside the variant's code, in a room above this one, and is found by its name at run time. It
imports neither torch nor the variant's library, so that configuration, `plan`, `doctor`, the planner, the
services and the documentation all read the same record.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

ALGORITHMS, REWARDS = "learner.algorithms.variants", "rollout_service.rewards.variants"
JOURNALS, SINKS = "asyncrl.buffer.journals.kinds", "asyncrl.control.record.sinks.services"
ENGINES, BACKENDS = "rollout_service.engine", "learner"
"""The modules of the records of estimators and losses, and of rewards; the packages that have a module for
each journal and sink; those that have a package for each engine and backend, with a module `variant`."""
VALUES, GREEDY, PROX, SUM_PI_SQUARED = "values", "greedy", "prox", "sum_pi_squared"
"""Inputs of an estimator besides rewards and groups: a critic's values, the reward of a greedy answer per
group, and two results of the pass over the batch at the start of a step."""

Record = TypeVar("Record")


@dataclass(frozen=True)
class Estimator:
    """One advantage estimator.

    Attributes:
        function: `module:name` of its function, imported by the learner alone.
        needs: Inputs besides rewards and groups.
        batch_wide: Why it needs the whole batch before its first token is trained; empty if it does not.
        is_discounted: Whether it reads `algorithm.gamma`.
        has_weights: It has importance weights of its own: a correction with weights would count them twice.
    """

    function: str
    needs: frozenset[str] = frozenset()
    batch_wide: str = ""
    is_discounted: bool = False
    has_weights: bool = False


@dataclass(frozen=True)
class PolicyLoss:
    """One policy loss.

    Attributes:
        function: `module:name` of its function, imported by the learner alone.
        picks_tokens: It singles out tokens of the microbatch at hand.
        aggregation: The one aggregation that it has; empty if `algorithm.aggregation` chooses.
        has_dual_clip: Whether it reads `algorithm.dual_clip`.
        is_policy_gradient: It is the plain policy gradient, which a correction may ask for.
        compares_behaviour: It measures the prox log-probs against the sampler's.
    """

    function: str
    picks_tokens: bool = False
    aggregation: str = ""
    has_dual_clip: bool = False
    is_policy_gradient: bool = False
    compares_behaviour: bool = False


@dataclass(frozen=True)
class RewardFacts:
    """One registered reward.

    Attributes:
        function: `module:name` of its function; empty for a reward with a model.
        has_model: Whether a model scores, that of its argument `path`.
        is_judge: Whether that model is asked at a server, that of its argument `base_url`.
        is_pooled: Whether processes beside the replica call it.
        forms: Its `pattern`s that the replica computes, the first by default; others are regular expressions.
        answer: `module:name` of the rule for a response's final answer; empty for the whole text.
        compares_text: Whether it compares the response with the ground truth, as `asyncrl init`'s example.
        part: `module:Class` of a reward that awaits something, made with its name and arguments.
    """

    function: str = ""
    has_model: bool = False
    is_judge: bool = False
    is_pooled: bool = False
    forms: tuple[str, ...] = ()
    answer: str = ""
    compares_text: bool = False
    part: str = ""


@dataclass(frozen=True)
class JournalFacts:
    """One journal of the buffer.

    Attributes:
        keeps_past: Whether a buffer that starts again finds what the last one committed.
        takes_url: Whether it needs `buffer.url`; no other journal reads it.
    """

    keeps_past: bool
    takes_url: bool = False


@dataclass(frozen=True)
class EngineFacts:
    """One inference engine.

    Attributes:
        title: Its name in messages.
        loads_model: Whether it loads `model.path`, whose limits it then has.
        has_gateway: Whether agents can generate through `rollout.gateway`.
        tokens_per_s: Rate of each request; None where at most `rollout.max_sequences` share a device.
        distributions: Requirement list -> the package that only this list has, such as `{"gpu": "vllm"}`.
        cpu_head_sizes: Sizes of attention heads that it runs on CPU; empty for all. On GPUs it runs any.
        cpu_latent_size: The same of a token's latent, in latent attention.
        owned_args: Names that `rollout.engine_args` may not hold, and where to set each or why not; None
            where the engine takes no arguments. owned_args_on_cpu: More of them where it runs on the CPU.
        shares_prefixes: Whether equal prompts can share their KV cache.
        logprob_tolerance: Difference of log-probs from one batch to another; 0 where they are bit-equal.
        environment: List of its own environment `.venv-<list>`. core_bytes: Memory of its processes on a CPU.
        quantizations: By `CPU` and `GPUs`. merges_adapters: Whether it takes versions of `model.lora`.
        records_experts: Whether it says which experts each token was sent to, for `rollout.router_replay`.
        one_gpu: Why a replica has one GPU at most; empty where the engine is cut over several.
        unfit_model: `module:function` of (`config.json`, tokens of a row) that tells why it cannot run it.
    """

    title: str
    loads_model: bool
    has_gateway: bool = False
    tokens_per_s: float | None = None
    distributions: Mapping[str, str] = field(default_factory=dict)
    cpu_head_sizes: tuple[int, ...] = ()
    cpu_latent_size: int = 0
    owned_args: Mapping[str, str] | None = None
    owned_args_on_cpu: Mapping[str, str] = field(default_factory=dict)
    shares_prefixes: bool = False
    logprob_tolerance: float = 0.0
    environment: str = ""
    core_bytes: int = 930 * 10**6
    quantizations: Mapping[str, str] = field(default_factory=dict)
    one_gpu: str = ""
    merges_adapters: bool = False
    unfit_model: str = ""
    records_experts: bool = False

    def find_deterministic_mode(self) -> str:
        """Return the setting under which no answer depends on other requests here; empty without it."""
        return ""


@dataclass(frozen=True)
class BackendFacts:
    """One training backend of the learner.

    Attributes:
        policy, value: `module:class` of its policy and of its critic, imported by the learner alone.
        takes_any_model: Whether it trains any Hugging Face model; else those of `asyncrl.models`.
        shards_weights: Whether its ranks share weights and gradients too, in fp32; `learner.offload` moves
            them to the host as well then.
        lacks: Options of `learner` without effect for it: `name`, or `name: value` for one value.
        hint: Its substitute for them; empty where another backend has the option.
        gpu_environment: Variables of a rank's process on a GPU.
        unfit_experts: `module:function` of (`learner`, `Experts` or None) that yields what is wrong with a
            layout, and a hint; empty where any layout will do.
    """

    policy: str
    value: str
    takes_any_model: bool = False
    shards_weights: bool = False
    lacks: tuple[str, ...] = ()
    hint: str = ""
    gpu_environment: Mapping[str, str] = field(default_factory=dict)
    unfit_experts: str = ""


def journal_names() -> tuple[str, ...]:
    """Return the names of `buffer.journal`, in the order of the alphabet."""
    return _modules(JOURNALS)


def sink_names() -> tuple[str, ...]:
    """Return the names of `metrics.sinks`, in the order of the alphabet."""
    return _modules(SINKS)


def engine_names() -> tuple[str, ...]:
    """Return the names of `rollout.engine`, in the order of the alphabet."""
    return _with_variant(ENGINES)


def backend_names() -> tuple[str, ...]:
    """Return the names of `learner.backend`, in the order of the alphabet."""
    return _with_variant(BACKENDS)


def journal_facts(name: str) -> JournalFacts:
    """Return the facts of a journal that a configuration names."""
    return find_record(f"{JOURNALS}.{name}", "KIND", JournalFacts)


def engine_facts(name: str) -> EngineFacts:
    """Return the facts of an engine that a configuration names."""
    return find_record(f"{ENGINES}.{name}.variant", "VARIANT", EngineFacts)


def backend_facts(name: str) -> BackendFacts:
    """Return the facts of a learner backend that a configuration names."""
    return find_record(f"{BACKENDS}.{name}.variant", "VARIANT", BackendFacts)


def estimators() -> Mapping[str, Estimator]:
    """Return the advantage estimators by name."""
    found: Mapping[str, Estimator] = import_module(ALGORITHMS).ADVANTAGES
    return found


def losses() -> Mapping[str, PolicyLoss]:
    """Return the policy losses by name."""
    found: Mapping[str, PolicyLoss] = import_module(ALGORITHMS).LOSSES
    return found


def rewards() -> Mapping[str, RewardFacts]:
    """Return the registered rewards by name."""
    found: Mapping[str, RewardFacts] = import_module(REWARDS).REWARDS
    return found


def estimators_needing(what: str) -> tuple[str, ...]:
    """Return the advantages that read `what`.

    >>> estimators_needing(GREEDY)
    ('remax',)
    """
    return tuple(name for name, one in estimators().items() if what in one.needs)


def find_record(module: str, attribute: str, kind: type[Record]) -> Record:
    """Import `module` and return its record.

    Raises:
        TypeError: The attribute is of another type.
    """
    found = getattr(import_module(module), attribute)
    if not isinstance(found, kind):
        raise TypeError(f"{module}.{attribute} is a {type(found).__name__}, not a {kind.__name__}")
    return found


def _modules(package: str) -> tuple[str, ...]:
    """Return the modules in `package`; none of them is imported."""
    return tuple(sorted(found.name for found in pkgutil.iter_modules(_folders(package))))


def _with_variant(package: str) -> tuple[str, ...]:
    """Return the packages in `package` that have a record; none of them is imported."""
    files = (file for folder in _folders(package) for file in Path(folder).glob("*/variant.py"))
    return tuple(sorted(file.parent.name for file in files))


def _folders(package: str) -> list[str]:
    spec = find_spec(package)
    return list(spec.submodule_search_locations or ()) if spec is not None else []


if TYPE_CHECKING:
    JournalName: TypeAlias = str
    EngineName: TypeAlias = str
    BackendName: TypeAlias = str
    SinkName: TypeAlias = str
else:
    JournalName, EngineName = Literal[journal_names()], Literal[engine_names()]
    BackendName, SinkName = Literal[backend_names()], Literal[sink_names()]
"""Name of a journal, an engine, a backend or a sink that has a record; another is refused with the list."""


def function(name: str) -> Callable[..., Any]:
    """Return the function `package.module:name`."""
    module, _, attribute = name.partition(":")
    found: Callable[..., Any] = getattr(import_module(module), attribute)
    return found
