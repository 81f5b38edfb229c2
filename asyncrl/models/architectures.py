"""Model size from a `config.json`, and the features that the Megatron learner cannot train (pure).

One rule for the check before the start and for the backend itself. Must never read a file.
FLOPs: a matrix product over t tokens with P weights takes 2 P t forward. Attention is counted causally:
2 x heads x (head size of keys + of values) per (query, key) pair and layer. The embedding look-up and norms
are not counted.
Invariant: an unknown architecture or feature is refused, because a model that is slightly wrong trains
without any sign of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

ROPE_TYPES = ("default", "llama3")
EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_PLAIN_FORM = {"use_sliding_window": False, "mlp_bias": False, "attention_bias": False}
_FOREIGN = {
    "attn_logit_softcapping": "it caps the logits of attention",
    "clip_qkv": "it clips queries, keys and values",
    "final_logit_softcapping": "it caps its logits",
    "kv_lora_rank": "its attention is latent (MLA)",
    "layer_types": "its layers are of several kinds",
    "no_rope_layers": "some of its layers have no rotary positions",
    "logits_scaling": "it scales its logits and residuals",
    "partial_rotary_factor": "it rotates a part of each head",
    "query_pre_attn_scalar": "it scales its queries otherwise",
}
"""Keys of a `config.json` that tell of a feature which no record has; plain values are as if not there."""
_PLAIN_VALUES: Mapping[str, object] = {"partial_rotary_factor": 1.0, "logits_scaling": 1.0}
ADDING = f"A family that differs from Llama in no more than a `Family` can say needs its record in {__name__}"


@dataclass(frozen=True)
class ExpertNames:
    """Names of a layer's experts in a checkpoint: of their block, and of each one's matrices.

    Attributes:
        normalises: Whether a token's weights sum to one where `config.json` does not say it.
    """

    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    normalises: bool = False


@dataclass(frozen=True)
class Family:
    """Differences of a family from Llama.

    Attributes:
        has_qkv_bias: Biases of queries, keys and values. has_qk_norm: Norms of each head's queries and keys.
        activation: Of the gate, as `hidden_act` names it.
        has_centred_norms: Norms multiply by one more than their weight.
        scales_embedding: By the root of the hidden size.
        is_tied: Whether a `config.json` that does not say it means a tied embedding.
        is_fused: Whether a checkpoint has q, k and v in one matrix, and gate and up in another.
        is_qk_norm_wide: Whether norms of queries and keys are over all heads together.
    """

    has_qkv_bias: bool = False
    has_qk_norm: bool = False
    activation: Literal["silu", "gelu_pytorch_tanh"] = "silu"
    has_centred_norms: bool = False
    scales_embedding: bool = False
    is_tied: bool = False
    is_fused: bool = False
    is_qk_norm_wide: bool = False
    experts: ExpertNames | None = None


FAMILIES = {
    "llama": Family(),
    "mistral": Family(),
    "qwen2": Family(has_qkv_bias=True),
    "qwen3": Family(has_qk_norm=True),
    "phi3": Family(is_fused=True),
    "gemma": Family(
        activation="gelu_pytorch_tanh", has_centred_norms=True, scales_embedding=True, is_tied=True
    ),
    "qwen3_moe": Family(has_qk_norm=True, experts=ExpertNames()),
    "olmoe": Family(has_qk_norm=True, is_qk_norm_wide=True, experts=ExpertNames()),
    "mixtral": Family(experts=ExpertNames("block_sparse_moe", "w1", "w3", "w2", normalises=True)),
}
"""Supported ones, by the `model_type` of a `config.json`."""


@dataclass(frozen=True)
class Experts:
    """Experts of a model.

    Attributes:
        num_active: Of each token. size: Channels of one.
        normalises: Whether the weights of a token's experts sum to one.
        layers: Whether each layer has experts, or is dense.
        num_shared: Of the same size that every token meets besides.
    """

    num: int
    num_active: int
    size: int
    normalises: bool
    layers: tuple[bool, ...]
    num_shared: int = 0

    @staticmethod
    def read(table: Mapping[str, object]) -> Experts | None:
        """Return what a `config.json` says, None of a dense model."""
        num = _whole(next((table[key] for key in EXPERT_KEYS if table.get(key)), 0))
        if not num:
            return None
        family = FAMILIES.get(str(table.get("model_type")), Family()).experts or ExpertNames()
        dense, step = table.get("mlp_only_layers") or (), _whole(table.get("decoder_sparse_step") or 1)
        first = _whole(table.get("first_k_dense_replace") or 0)
        if not isinstance(dense, Sequence):
            raise TypeError("mlp_only_layers is no list")
        return Experts(
            num,
            _whole(table["num_experts_per_tok"]),
            _whole(table.get("moe_intermediate_size") or table["intermediate_size"]),
            bool(table.get("norm_topk_prob", family.normalises)),
            tuple(
                i >= first and i not in dense and not (i + 1) % step
                for i in range(_whole(table["num_hidden_layers"]))
            ),
            _whole(table.get("n_shared_experts") or 0),
        )


@dataclass(frozen=True)
class Latent:
    """Latent attention (MLA): keys and values of all heads are made of `rank` numbers of each token.

    Attributes:
        rotary: Further numbers of a token, which all heads' keys have in common. query_rank: 0 without one.
        value_size: Of a head's values; its queries and keys have the model's head size.
    """

    rank: int
    rotary: int
    query_rank: int
    value_size: int

    def count_weights(self, hidden: int, num_heads: int, head_size: int) -> int:
        """Return the weights of a layer's projections."""
        queries, made = num_heads * head_size, head_size - self.rotary + self.value_size
        asked = self.query_rank * (hidden + queries) if self.query_rank else hidden * queries
        kept = hidden * (self.rank + self.rotary) + self.rank * num_heads * made
        return asked + kept + num_heads * self.value_size * hidden


@dataclass(frozen=True)
class ModelSize:
    """Sizes of a decoder that determine its FLOPs."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_key_value_heads: int
    head_size: int
    intermediate_size: int
    vocab_size: int
    experts: Experts | None = None
    latent: Latent | None = None

    @staticmethod
    def read(table: Mapping[str, object]) -> ModelSize:
        """Return what a Hugging Face `config.json` says. Raises KeyError or TypeError if not."""
        num_heads, hidden_size = _whole(table["num_attention_heads"]), _whole(table["hidden_size"])
        latent, head_size = None, table.get("head_dim") or hidden_size // num_heads
        if table.get("kv_lora_rank"):
            parts = (table[key] for key in ("kv_lora_rank", "qk_rope_head_dim", "v_head_dim"))
            rank, rotary, values = map(_whole, parts)
            latent = Latent(rank, rotary, _whole(table.get("q_lora_rank") or 0), values)
            head_size = rotary + _whole(table["qk_nope_head_dim"])
        return ModelSize(
            num_layers=_whole(table["num_hidden_layers"]),
            hidden_size=hidden_size,
            num_heads=num_heads,
            num_key_value_heads=_whole(table.get("num_key_value_heads") or num_heads),
            head_size=_whole(head_size),
            intermediate_size=_whole(table["intermediate_size"]),
            vocab_size=_whole(table["vocab_size"]),
            experts=Experts.read(table),
            latent=latent,
        )

    @property
    def num_cached(self) -> int:
        """Numbers that an engine keeps of each token."""
        latent, plain = self.latent, 2 * self.num_key_value_heads * self.head_size
        return self.num_layers * (latent.rank + latent.rotary if latent else plain)

    @property
    def num_weights(self) -> int:
        """Weights that every token is multiplied with: the output projection is, the embedding is not."""
        attention = self.hidden_size * self.head_size * 2 * (self.num_heads + self.num_key_value_heads)
        if self.latent is not None:
            attention = self.latent.count_weights(self.hidden_size, self.num_heads, self.head_size)
        experts = self.experts
        num_sparse = sum(experts.layers) if experts else 0
        channels = 3 * self.intermediate_size * (self.num_layers - num_sparse)
        if experts is not None:  # the router has a row for each
            met = experts.num_active + experts.num_shared
            channels += num_sparse * (3 * experts.size * met + experts.num)
        return self.num_layers * attention + self.hidden_size * (channels + self.vocab_size)

    def forward_flops(self, num_tokens: float, num_pairs: float) -> float:
        """Return the FLOPs of one forward pass over rows with `num_pairs` causal (query, key) pairs."""
        sizes = self.head_size + (self.latent.value_size if self.latent else self.head_size)
        attention = 2 * self.num_layers * self.num_heads * sizes * num_pairs
        return 2 * self.num_weights * num_tokens + attention


def find_unsupported(table: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """Yield (problem, hint) for what of a Hugging Face `config.json` is not supported."""
    family = FAMILIES.get(str(table.get("model_type")))
    names = ", ".join(name for name, known in FAMILIES.items() if known.experts)
    yield from _find_foreign(table)
    experts = next((key for key in EXPERT_KEYS if table.get(key)), None)
    if experts is not None and (family is None or family.experts is None):
        yield f"{experts}: {table[experts]}: these experts are not supported", f"Choose one of {names}"
    elif experts is not None and table.get("num_experts_per_tok") == 1:
        yield "num_experts_per_tok: 1 is not supported: its router gets no gradient", "Two or more are"
    if family is None:
        hint = f"Supported: {', '.join(FAMILIES)}. {ADDING}"
        yield f"model_type '{table.get('model_type')}' is not supported", hint
        return
    for key, wanted in (_PLAIN_FORM | {"hidden_act": family.activation}).items():
        if table.get(key, wanted) != wanted:
            yield f"{key}: {table[key]} is not supported", f"Only {key}: {wanted} is"
    rope_type = rope_type_of(table)
    if rope_type not in ROPE_TYPES:
        yield f"rope_type '{rope_type}' is not supported", f"Supported: {', '.join(ROPE_TYPES)}"


def find_router_problem(table: Mapping[str, object]) -> str:
    """Return why routers, if not by a softmax over experts, cannot have losses; empty if they can."""
    family = FAMILIES.get(str(table.get("model_type")), Family())
    is_known = family.experts is not None and any(table.get(key) for key in EXPERT_KEYS)
    return "" if is_known else "the model has no experts, or how their router scores them is not known here"


def _find_foreign(table: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """Yield (problem, hint) for features that would be left out without any sign of it."""
    kind, hint = table.get("model_type"), "No record of a family can say that"
    values = {**read_rope(table), **table}
    for key, what in _FOREIGN.items():
        found = values.get(key)
        if key == "layer_types" and isinstance(found, Sequence):
            found = [one for one in found if one != "full_attention"]
        if found and found != _PLAIN_VALUES.get(key):
            yield f"model_type '{kind}', {key}: {found} is not supported: {what}", hint
    window, positions = table.get("sliding_window"), table.get("max_position_embeddings")
    is_short = not isinstance(window, int) or not isinstance(positions, int) or window < positions
    if window and is_short and table.get("use_sliding_window") is None:
        yield f"sliding_window: {window} is not supported", "Only sliding_window: null is"


def is_tied(table: Mapping[str, object]) -> bool:
    """Return whether the output projection is the embedding."""
    family = FAMILIES.get(str(table.get("model_type")), Family())
    return bool(table.get("tie_word_embeddings", family.is_tied))


def read_max_positions(table: Mapping[str, object]) -> int | None:
    """Return how long a row of the model may be, None if that is not told or a rotary factor changes it."""
    found = table.get("max_position_embeddings")
    is_plain = rope_type_of(table) in ROPE_TYPES and "model_max_length" not in table
    return found if isinstance(found, int) and is_plain else None


def read_rope(table: Mapping[str, object]) -> dict[str, object]:
    """Return the rotary parameters: newer files have all in one table, older ones a table of changes."""
    return _map(table, "rope_scaling") | _map(table, "rope_parameters")


def _map(table: Mapping[str, object], key: str) -> dict[str, object]:
    found = table.get(key) or {}
    if not isinstance(found, Mapping):
        raise TypeError(f"{key} is a {type(found).__name__}, not a table")
    return dict(found)


def _whole(value: object) -> int:
    if not isinstance(value, int | float | str):
        raise TypeError(f"a {type(value).__name__} is no number")
    return int(value)


def rope_type_of(table: Mapping[str, object]) -> str:
    """Return the kind of rotary embedding."""
    rope = read_rope(table)
    return str(rope.get("rope_type", rope.get("type", "default")))
