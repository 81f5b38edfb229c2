"""Adapters of a version: which matrices have them, and the weights that they are merged into."""

import pytest
import torch

from asyncrl.core.config.tree import LoraSection
from asyncrl.core.errors import ConfigError, SyncError
from weight_sync.encoding.low_rank import factor_shapes, merge_factors

LORA = LoraSection(rank=2, alpha=3.0, targets=("q_proj", "up_proj"))
SHAPES = {
    "embed.weight": (9, 4),
    "0.q_proj.weight": (6, 4),
    "0.q_proj.bias": (6,),
    "0.k_proj.weight": (3, 4),
    "0.up_proj.weight": (5, 4),
}


def tensors_of(shapes, seed):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def test_each_matrix_of_a_target_has_two_factors():
    assert factor_shapes(SHAPES, LORA) == {
        "0.q_proj.lora_A.weight": (2, 4),
        "0.q_proj.lora_B.weight": (6, 2),
        "0.up_proj.lora_A.weight": (2, 4),
        "0.up_proj.lora_B.weight": (5, 2),
    }


def test_a_target_that_is_no_matrix_is_refused_with_the_names_of_those_there_are():
    with pytest.raises(ConfigError, match=r"called norm, bias\. It has embed, k_proj, q_proj, up_proj"):
        factor_shapes(SHAPES, LORA.model_copy(update={"targets": ("q_proj", "norm", "bias")}))


def test_merged_are_the_targets_alone_rounded_once_and_the_base_stays_as_it_was():
    base, factors = tensors_of(SHAPES, 0), tensors_of(factor_shapes(SHAPES, LORA), 1)
    kept = {name: tensor.clone() for name, tensor in base.items()}
    merged = dict(merge_factors(base.items(), factors, LORA.scale, torch.bfloat16))
    assert list(merged) == list(base)
    for name, tensor in base.items():
        assert torch.equal(tensor, kept[name])
        stem = name.removesuffix(".weight")
        if f"{stem}.lora_A.weight" not in factors:
            assert merged[name] is tensor
            continue
        delta = factors[f"{stem}.lora_B.weight"].double() @ factors[f"{stem}.lora_A.weight"].double() * 1.5
        assert torch.equal(merged[name], (tensor.double() + delta).bfloat16())


def test_a_factor_of_no_matrix_is_refused():
    factors = tensors_of(factor_shapes(SHAPES, LORA), 1)
    without = {name: torch.zeros(shape) for name, shape in SHAPES.items() if "up_proj" not in name}
    with pytest.raises(SyncError, match=r"no matrix of the factors \['0.up_proj.lora_A.weight'"):
        list(merge_factors(without.items(), factors, LORA.scale, torch.float32))


def test_a_target_that_is_a_matrix_of_experts_is_refused():
    shapes = SHAPES | {"0.mlp.experts.1.up_proj.weight": (5, 4)}
    with pytest.raises(ConfigError, match="up_proj are matrices of experts"):
        factor_shapes(shapes, LORA)
    attention = LORA.model_copy(update={"targets": ("q_proj",)})
    assert factor_shapes(shapes, attention) == factor_shapes(SHAPES, attention)
