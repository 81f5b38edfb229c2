"""Checks of the models that a configuration names: there, readable, supported, of one vocabulary.

Owns what the model folders on this machine say. Nothing is loaded: a `config.json` and a tokenizer are read.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from asyncrl.core.config.prefix_caching import choose_prefix_caching
from asyncrl.core.config.tree import Config, LearnerSection
from asyncrl.core.errors import ConfigError
from asyncrl.core.variants import backend_facts, backend_names, function
from asyncrl.models.architectures import FAMILIES, Experts, Family, find_router_problem, find_unsupported
from asyncrl.models.divisibility import find_uneven_cuts
from asyncrl.models.named_models import find_table, tensor_shapes
from asyncrl.planner.plan.folders import find_bad_weights, find_missing_tokenizer
from asyncrl.planner.plan.footprint.shared_memory import shapes_of
from asyncrl.planner.plan.prepare import is_builtin, is_hub_id, reward_model
from weight_sync.encoding.low_rank import factor_shapes


def check_models(config: Config) -> Iterator[str]:
    """Say what is wrong with the policy's model, and with the critic's if it has one of its own."""
    named = {"model.path": config.model.path, "critic.path": config.critic.path}
    paths = {key: path for key, path in named.items() if path is not None}
    for key, path in paths.items():
        yield from _check_model(key, path, config)
    yield from _check_tokenizer(paths)


def check_reward_models(config: Config) -> Iterator[str]:
    """Say which folder of a reward model holds none."""
    for part in config.reward.fn:
        path = reward_model(part)
        if path is None or is_builtin(path) or is_hub_id(path):
            continue
        if not Path(path, "config.json").exists():
            yield f"reward.fn: '{path}' holds no Hugging Face model (no config.json)"


def check_adapters(config: Config) -> Iterator[str]:
    """Say which adapters the model cannot have, and whether those to start from are there."""
    lora, path = config.model.lora, config.model.path
    if not lora.rank:
        return
    try:
        if shapes := shapes_of(path):
            factor_shapes(shapes, lora)
        table, backend = table_of(path), config.learner.backend
        if FAMILIES.get(str(table.get("model_type")), Family()).is_fused and not (
            backend_facts(backend).takes_any_model
        ):
            yield (
                f"model.lora.rank: learner.backend: {backend} has no adapters on the fused matrices of "
                f"'{table['model_type']}'; set learner.backend: {_backends_of_any_model()}"
            )
    except ConfigError as error:
        yield f"{error}"
    except (OSError, ValueError, TypeError):
        return  # `check_models` says why
    if lora.path is not None and not Path(lora.path, "adapter_config.json").is_file():
        yield f"model.lora.path: '{lora.path}' holds no PEFT adapter (no adapter_config.json)"


def check_router_replay(config: Config) -> Iterator[str]:
    """Say why no experts can be recorded: there are none, or a GPU's engine would not keep them."""
    key = "rollout.router_replay: r3"
    if config.rollout.router_replay == "off":
        return
    with contextlib.suppress(KeyError, OSError, ValueError, TypeError):  # `check_models` says why
        if Experts.read(table_of(config.model.path)) is None:
            yield f"{key} needs a mixture of experts, and '{config.model.path}' is none; set it to off"
    is_shared, why = choose_prefix_caching(config)
    if config.rollout.gpus and not is_shared:
        yield f"{key} needs rollout.prefix_caching on GPUs, and it is off ({why}); set it to true"


def check_router_losses(config: Config) -> Iterator[str]:
    """Say why the model's routers cannot have losses of their own."""
    if config.learner.router_aux_loss or config.learner.router_z_loss:
        with contextlib.suppress(OSError, ValueError, TypeError):  # `check_models` says why
            if problem := find_router_problem(table_of(config.model.path)):
                yield f"learner.router_aux_loss, router_z_loss: {problem}; leave them out, or 0"


def _check_tokenizer(paths: Mapping[str, str]) -> Iterator[str]:
    """Say whether the policy's tokenizer is missing, cannot be loaded, or has ids that a model does not know.

    It makes the rows that policy and critic read. A model may know more ids: vocabularies are padded.
    """
    policy = paths["model.path"]
    if Path(policy, "config.json").exists():
        find_bad = function("rollout_service.data.inspection:find_bad_tokenizer")
        if problem := find_missing_tokenizer(Path(policy)) or find_bad(Path(policy)):
            yield f"model.path: {problem}"
            return
    num_tokens = _count_token_ids(policy) or _vocabulary(policy) or 0
    for key, path in paths.items():
        size = _vocabulary(path)
        if size is not None and size < num_tokens:
            whose = "its" if path == policy else f"the policy's ('{policy}')"
            yield (
                f"{key}: '{path}' knows {size} tokens (vocab_size), and {whose} tokenizer has ids up to "
                f"{num_tokens - 1}; choose a model and a tokenizer of one family"
            )


def _check_model(key: str, path: str, config: Config) -> Iterator[str]:
    if is_builtin(path) or is_hub_id(path):
        return
    config_file = Path(path) / "config.json"
    if not config_file.exists():
        yield f"{key}: '{path}' holds no Hugging Face model (no config.json); name a folder or a hub id"
        return
    try:
        table = read_table(config_file)
    except (OSError, ValueError, TypeError) as error:
        yield f"{key}: '{config_file}' cannot be read: {error}"
        return
    if table.get("quantization_config"):
        yield f"{key}: '{path}' holds quantised weights; name the model that they were made of"
    has_head = key == "model.path"  # a critic's head gives a value instead, and starts from zero
    if problem := find_bad_weights(Path(path), dict(tensor_shapes(table, has_head))):
        yield f"{key}: {problem}"
    if backend_facts(config.learner.backend).takes_any_model:
        return
    for problem, hint in find_unsupported(table):
        other = f", or any other model with learner.backend: {_backends_of_any_model()}"
        yield f"{key}: '{path}': {problem}; {hint[0].lower()}{hint[1:]}{other}"
        return
    yield from _find_uneven_cuts(table, config.learner)


def check_cuts_of_named_models(config: Config) -> Iterator[str]:
    """Say where a model that is known by its name alone cannot be cut."""
    for path in filter(None, (config.model.path, config.critic.path)):
        if not Path(path).exists():
            yield from _find_uneven_cuts(find_table(path) or {}, config.learner)


def _backends_of_any_model() -> str:
    return " or ".join(name for name in backend_names() if backend_facts(name).takes_any_model)


def read_table(config_file: Path) -> dict[str, Any]:
    """Return what a model's `config.json` holds. Raises OSError, ValueError or TypeError."""
    return dict(json.loads(config_file.read_text()))


def table_of(path: str) -> Mapping[str, object]:
    """Return what is known of the dimensions of the model that `path` names: those of its folder, or stored.

    Raises:
        OSError, ValueError, TypeError: Nothing is.
    """
    stored = None if Path(path).exists() else find_table(path)
    return read_table(Path(path) / "config.json") if stored is None else stored


def _vocabulary(path: str) -> int | None:
    """Return how many tokens the model in the folder `path` knows, if that can be told."""
    try:
        size = read_table(Path(path) / "config.json").get("vocab_size")
    except (OSError, ValueError, TypeError):
        return None
    return size if isinstance(size, int) else None


def _count_token_ids(path: str) -> int | None:
    """Return one more than the largest id of the tokenizer in the folder `path`, if that can be told.

    Special tokens beyond its model's vocabulary do not count: no row has them (Gemma 3's image token).
    """
    size = _vocabulary(path) or 0
    try:
        table = read_table(Path(path) / "tokenizer.json")
        vocabulary, added = table["model"]["vocab"], table.get("added_tokens") or []
        # Unigram models list their tokens in the order of their ids, all others map tokens to ids.
        ids = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
        known = [token["id"] for token in added if token["id"] < size or not token.get("special")]
        return 1 + max((*ids, *known), default=-1)
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _find_uneven_cuts(table: Mapping[str, object], learner: LearnerSection) -> Iterator[str]:
    """Say where the model of `table` cannot be cut; what `table` lacks the learner itself complains of."""
    heads = table.get("num_key_value_heads") or table.get("num_attention_heads")
    sizes = {name: table.get(name) for name in ("num_hidden_layers", "intermediate_size", "vocab_size")}
    counts = [count for count in (heads, *sizes.values()) if isinstance(count, int)]
    if len(counts) < 4:
        return
    num_heads, num_layers, intermediate_size, vocab_size = counts
    uneven = find_uneven_cuts(
        tp=learner.tp,
        pp=learner.pp,
        vpp=learner.vpp,
        num_layers=num_layers,
        num_key_value_heads=num_heads,
        intermediate_size=intermediate_size,
        vocab_size=vocab_size,
    )
    problems, find_unfit = list(uneven), backend_facts(learner.backend).unfit_experts
    with contextlib.suppress(KeyError, TypeError, ValueError):
        problems += function(find_unfit)(learner, Experts.read(table)) if find_unfit else ()
    yield from (f"{problem}; {hint[0].lower()}{hint[1:]}" for problem, hint in problems)
