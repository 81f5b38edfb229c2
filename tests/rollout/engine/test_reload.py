"""vLLM's layer-wise reload on small modules: state derived from a parameter follows every holder of it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import Module, Parameter
from vllm.model_executor.layers.attention import MLAAttention
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

from asyncrl.core.errors import SyncError
from rollout_service.engine.vllm.reload import find_refused, find_shared, reload

SIZE = 4
CONFIG: Any = SimpleNamespace(dtype=torch.float32)
Tensors = Iterable[tuple[str, torch.Tensor]]


class Packing(QuantizeMethodBase):
    """Keeps a copy of all weights, as oneDNN does, and computes with nothing else."""

    def create_weights(self, layer: Module, *args: Any, **options: Any) -> None:
        raise NotImplementedError

    def apply(self, layer: Module, *args: Any, **options: Any) -> None:
        raise NotImplementedError

    def process_weights_after_loading(self, layer: Module) -> None:
        layer.packed = {name: tensor.detach().clone() for name, tensor in layer.named_parameters()}


class Matrix(Module):
    def __init__(self, **parameters: Parameter) -> None:
        super().__init__()
        self.quant_method = Packing()
        for name, parameter in parameters.items():
            self.register_parameter(name, parameter)


class Model(Module):
    """A model that finds parameters by name; `weight[1]` means the second half of its rows."""

    def __init__(self, **matrices: Matrix) -> None:
        super().__init__()
        for name, matrix in matrices.items():
            self.add_module(name, matrix)
        record_metadata_for_reloading(self)

    def load_weights(self, tensors: Tensors) -> None:
        for name, tensor in tensors:
            name, _, half = name.partition("[")
            parameter: Any = self.get_parameter(name)
            if half:
                parameter.weight_loader(param=parameter, loaded_weight=tensor, half=int(half[0]))
            else:
                parameter.weight_loader(parameter, tensor)


def weight(*shape: int) -> Parameter:
    return Parameter(torch.zeros(shape or (SIZE, SIZE)), requires_grad=False)


def values(number: int) -> torch.Tensor:
    return torch.full((SIZE, SIZE), float(number))


def tied() -> Model:
    shared = weight()
    return Model(embedding=Matrix(weight=shared), middle=Matrix(weight=weight()), head=Matrix(weight=shared))


def load(model: Model, tensors: Tensors) -> None:
    reload(model, CONFIG, tensors)


def test_a_module_that_holds_a_loaded_parameter_of_another_is_processed_again_at_every_load():
    model = tied()
    for number in (1, 2, 3):
        load(model, [("embedding.weight", values(number)), ("middle.weight", values(-number))])
        for matrix, wanted in ((model.embedding, number), (model.middle, -number), (model.head, number)):
            assert torch.equal(matrix.weight, values(wanted))
            assert torch.equal(matrix.packed["weight"], values(wanted)), "it computes with older weights"


def test_a_shared_parameter_stays_one_at_the_same_address():
    model = tied()
    parameter, address = model.head.weight, model.head.weight.data_ptr()
    for number in (1, 2):
        load(model, [("embedding.weight", values(number)), ("middle.weight", values(0))])
        assert model.embedding.weight is model.head.weight is parameter
        assert parameter.data_ptr() == address


def test_a_module_with_a_parameter_of_its_own_beside_a_shared_one_gets_both():
    shared = weight()
    model = Model(embedding=Matrix(weight=shared), head=Matrix(offset=weight(SIZE), weight=shared))
    for number in (1, 2):
        load(model, [("embedding.weight", values(number)), ("head.offset", values(number)[0])])
        assert torch.equal(model.embedding.packed["weight"], values(number))
        assert torch.equal(model.head.packed["weight"], values(number))
        assert torch.equal(model.head.packed["offset"], values(number)[0])
        assert torch.equal(shared, values(number))


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_parameter_that_comes_in_parts_is_whole_for_each_of_three_holders(order: tuple[int, int]):
    shared = weight()

    def load_half(param: torch.Tensor, loaded_weight: torch.Tensor, half: int) -> None:
        param.data[half * 2 : half * 2 + 2].copy_(loaded_weight)

    shared.weight_loader = load_half  # type: ignore[attr-defined]
    model = Model(a=Matrix(weight=shared), b=Matrix(weight=shared), c=Matrix(weight=shared))
    for number in (1, 2):
        load(model, [(f"b.weight[{half}]", values(number + 10 * half)[:2]) for half in order])
        wanted = torch.cat([values(number)[:2], values(number + 10)[:2]])
        assert all(torch.equal(matrix.packed["weight"], wanted) for matrix in (model.a, model.b, model.c))


def test_a_load_leaves_no_reference_to_what_it_was_given():
    model = tied()
    for number in (1, 2):
        tensor = values(number)
        load(model, [("embedding.weight", tensor), ("middle.weight", values(0))])
        is_gone = weakref.ref(tensor)
        del tensor
        gc.collect()
        assert is_gone() is None


def test_what_got_nothing_is_named_whatever_the_model_says_and_the_next_load_starts_clean():
    model = tied()
    with pytest.raises(SyncError, match=r"brought nothing .* \['middle.weight'\]"):
        load(model, [("embedding.weight", values(1))])
    with pytest.raises(SyncError, match=r"brought nothing .* \['embedding.weight', 'head.weight'\]"):
        load(model, [("middle.weight", values(1))])
    load(model, [("embedding.weight", values(2)), ("middle.weight", values(3))])
    assert torch.equal(model.head.packed["weight"], values(2))


def test_a_load_that_breaks_half_way_leaves_nothing_behind():
    model = tied()

    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield "embedding.weight", values(1)
        raise OSError("the file is gone")

    with pytest.raises(OSError, match="gone"):
        load(model, broken())
    load(model, [("embedding.weight", values(2)), ("middle.weight", values(3))])
    assert torch.equal(model.head.packed["weight"], values(2))
    assert model.embedding.weight is model.head.weight


class PackingExperts(UnquantizedFusedMoEMethod):
    """Packs when it makes its kernel, and otherwise leaves what it computes with, as vLLM's does on CPU."""

    def __init__(self) -> None:
        Module.__init__(self)
        self.moe_kernel = None

    def process_weights_after_loading(self, layer: Module) -> None:
        if self.moe_kernel is None:
            layer.packed = {name: tensor.detach().clone() for name, tensor in layer.named_parameters()}
            self.moe_kernel = "made"


def experts() -> Model:
    """Return a model of two stacked experts, two rows each."""

    def load_half(param: torch.Tensor, loaded_weight: torch.Tensor, half: int) -> None:
        param.data[half * 2 : half * 2 + 2].copy_(loaded_weight)

    stacked = weight()
    stacked.weight_loader = load_half  # type: ignore[attr-defined]
    matrix = Matrix(weight=stacked)
    matrix.quant_method = PackingExperts()  # type: ignore[assignment]
    matrix.quant_method.process_weights_after_loading(matrix)
    return Model(experts=matrix)


def test_experts_are_packed_again_at_every_load():
    model = experts()
    for number in (1, 2):
        load(model, [(f"experts.weight[{half}]", values(number)[:2]) for half in (1, 0)])
        assert torch.equal(model.experts.packed["weight"], values(number)), "it computes with older weights"


def test_an_expert_that_got_nothing_is_found_beside_one_that_got_all():
    model = experts()
    with pytest.raises(SyncError, match=r"brought nothing .* \['experts.weight'\]"):
        load(model, [("experts.weight[1]", values(1)[:2])])
    load(model, [(f"experts.weight[{half}]", values(2)[:2]) for half in (0, 1)])
    assert torch.equal(model.experts.packed["weight"], values(2))


def test_a_tensor_that_vllm_loads_where_it_lies_has_no_copies_to_load():
    shared = weight()
    model = Model(
        gate=Matrix(weight=weight(), e_score_correction_bias=shared),
        experts=Matrix(weight=weight(), e_score_correction_bias=shared),
    )
    assert find_shared(model) == []
    shared.weight_loader = lambda param, loaded: param.data.copy_(loaded)  # type: ignore[attr-defined]
    for number in (1, 2):
        load(model, [(f"{name}.weight", values(number)) for name in ("gate", "experts")])
        load(
            model,
            [
                ("gate.weight", values(number)),
                ("gate.e_score_correction_bias", values(-number)),
                ("experts.weight", values(number)),
            ],
        )
        assert model.experts.e_score_correction_bias is model.gate.e_score_correction_bias is shared
        assert torch.equal(shared, values(-number))


# --- what is refused when an engine starts --------------------------------------------------------


def refusals(model: Module, **config: Any) -> list[str]:
    return list(find_refused(model, SimpleNamespace(**config)))  # type: ignore[arg-type]


def unquantized(**parameters: Parameter) -> Matrix:
    matrix = Matrix(**parameters)
    matrix.quant_method = UnquantizedLinearMethod()  # type: ignore[assignment]
    return matrix


def test_a_module_with_a_processing_that_is_not_known_to_be_repeatable_is_named():
    model = Module()
    model.good, model.experts = unquantized(weight=weight()), Matrix(weight=weight())
    assert refusals(model) == ["'experts' (Matrix) is processed by Packing"]


def test_a_module_that_processes_its_own_weights_is_named():
    class Absorbing(Module):
        def process_weights_after_loading(self, dtype: torch.dtype) -> None:
            """Derive something."""

    model = Module()
    model.attention = Absorbing()
    assert refusals(model) == ["'attention' (Absorbing) processes its weights in a way of its own"]


def latent_attention(*, is_packed: bool) -> Module:
    """Return vLLM's module without its parts, and what it has derived of the projection beside it."""
    model, projection = Module(), unquantized(weight=weight())
    attention = MLAAttention.__new__(MLAAttention)
    Module.__init__(attention)
    attention.is_amx_bmm_enabled = is_packed
    attention.W_UV = Parameter(projection.weight.data[:2].T, requires_grad=False)
    model.kv_b_proj, model.attention = projection, attention
    return model


def test_latent_attention_is_taken_but_where_its_weights_are_packed_for_amx():
    assert refusals(latent_attention(is_packed=False)) == []
    (refusal,) = refusals(latent_attention(is_packed=True))
    assert refusal == "'attention' (MLAAttention) processes its weights in a way of its own"


def test_a_tensor_that_lies_in_the_memory_of_another_module_s_weight_is_named():
    model = Module()
    model.a, model.b = unquantized(weight=weight()), unquantized()
    model.b.register_buffer("part", model.a.weight.data[:2])
    assert refusals(model) == ["'b.part' lies in the memory of 'a.weight'"]
    shared = weight()
    model = Module()
    model.a, model.b = unquantized(weight=shared), unquantized(weight=shared)
    assert refusals(model) == []
    assert [[holder.full_name for holder in group] for group in find_shared(model)] == [
        ["a.weight", "b.weight"]
    ]


def test_a_head_that_only_the_checkpoint_s_config_calls_tied_is_named():
    model = Module()
    model.a, model.b = unquantized(weight=weight()), unquantized(weight=weight())
    assert refusals(model) == []
    (refusal,) = refusals(model, word_embeddings_untied_by_checkpoint=True)
    assert "'lm_head.weight' that is not the embedding" in refusal
    model.b.weight = model.a.weight
    assert refusals(model, word_embeddings_untied_by_checkpoint=True) == []
