"""Losses of routers: value and gradient are those of a plain formula, however an update is cut."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen2MoeConfig

from asyncrl.core.errors import ConfigError
from learner.batching.batch import PackedBatch
from learner.fsdp2.backend import Fsdp2ValueBackend
from learner.megatron.backend import MegatronValueBackend
from tests.different import as_saved
from tests.learner.backends.experts.test_expert_parallel import OF_FOUR, OF_TWO, SMALL, check, run_jobs
from tests.learner.backends.sharing.test_shared_experts import record
from tests.learner.backends.sharing.test_shared_prompt import (
    OPENERS,
    UNCLIPPED,
    assert_gradients_alike,
    loss,
    make_batch,
    weigh,
)
from tests.learner.backends.test_precision import force_scale
from tests.learner.parts.contract import gradients_of
from tests.learner.parts.launching import assert_trained_alike, run_alone, run_ranks
from tests.learner.parts.samples import save_model
from tests.learner.parts.training import squared_error, train

BOTH = {"router_aux_loss": 0.7, "router_z_loss": 0.05}
MANY = {"router_aux_loss": 100.0, "router_z_loss": 10.0}
"""Beside a policy loss that is a sum over all tokens."""
NAMES = ("actor/router_aux_loss", "actor/router_z_loss")
KINDS = ("qwen3_moe", "mixtral")
LONG_PROMPTS = {"max_tokens": 12, "prompt_tokens": (24, 36)}


def compute_row(
    model: Any, tokens_T: torch.Tensor, experts_TLK: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """Return the row's log-probs [T, V]; the sum over layers of its balance, and of its squares; the layers.

    Recorded experts are taken where there are any, with the scores that the router itself has for them.
    """
    found: list[tuple[torch.Tensor, torch.Tensor]] = []

    def note(layer: int, output: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        logits_TE, scores_TK, chosen_TK = output
        if experts_TLK is not None:
            is_there_T1 = experts_TLK[:, layer, :1] >= 0
            chosen_TK = torch.where(is_there_T1, experts_TLK[:, layer].long(), chosen_TK)
            taken_TK = logits_TE.softmax(-1).gather(-1, chosen_TK)
            if model.config.model_type == "mixtral":
                taken_TK = taken_TK / taken_TK.sum(-1, keepdim=True)
            scores_TK = torch.where(is_there_T1, taken_TK, scores_TK)
        found.append((logits_TE, chosen_TK))
        return logits_TE, scores_TK, chosen_TK

    sparse = [
        (layer, one.mlp.gate) for layer, one in enumerate(model.model.layers) if hasattr(one.mlp, "gate")
    ]
    hooks = [
        gate.register_forward_hook(lambda _gate, _given, output, layer=layer: note(layer, output))
        for layer, gate in sparse
    ]
    table_TV = model(tokens_T[None]).logits[0].log_softmax(-1)
    for hook in hooks:
        hook.remove()
    balance = square = torch.zeros(())
    for logits_TE, chosen_TK in found:
        num_tokens, num_experts = logits_TE.shape
        share_E = torch.bincount(chosen_TK.flatten(), minlength=num_experts) / num_tokens
        balance = balance + num_experts / 2 * (share_E * logits_TE.softmax(-1).mean(0)).sum()
        square = square + logits_TE.exp().sum(-1).log().square().sum()
    return table_TV, balance, square, len(sparse)


def by_formula(folder: Path, batch: PackedBatch) -> tuple[float, float, dict[str, torch.Tensor]]:
    """Return both losses, and the gradient of the policy's loss with them, from rows alone and unpadded."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    total = balance = square = torch.zeros(())
    weight_N, num_layers = weigh(batch), 0
    for start, end in zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True):
        experts = None if batch.experts_N is None else batch.experts_N[start:end]
        table, one, other, num_layers = compute_row(model, batch.tokens_N[start:end], experts)
        logprobs = table.gather(-1, batch.labels_N[start:end, None])[:, 0]
        entropy = -(table.exp() * table).sum(-1)
        total = total + ((logprobs + 0.1 * entropy) * weight_N[start:end]).sum()
        balance, square = balance + one, square + other
    balance, square = balance / batch.num_rows / num_layers, square / batch.num_tokens / num_layers
    (total + MANY["router_aux_loss"] * balance + MANY["router_z_loss"] * square).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return balance.item(), square.item(), as_saved(gradients, model.config.model_type)


def update(
    opener: Callable[..., Any], model: Path, batch: PackedBatch, *, is_scaled: bool = False, **changes: Any
) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    backend = opener(model, **(UNCLIPPED | changes))
    if is_scaled:
        force_scale(backend)
    metrics, gradients = backend.update(batch, loss), gradients_of(backend)
    backend.close()
    return metrics, gradients


MAKERS = {"own": make_batch, "recorded": lambda: record(make_batch())}


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module", params=MAKERS)
def wanted(request: pytest.FixtureRequest, model: Path) -> tuple[PackedBatch, tuple[Any, ...]]:
    batch = MAKERS[request.param]()
    return batch, by_formula(model, batch)


@pytest.mark.parametrize(
    "changes",
    [
        {"is_scaled": True},
        {"shared_prompt": "off"},
        {"max_tokens_per_microbatch": 330, "recompute": "full"},
    ],
    ids=str,
)
@pytest.mark.parametrize("backend", OPENERS)
def test_value_and_gradient_are_those_of_the_formula(
    backend: str, changes: dict[str, Any], model: Path, wanted: tuple[PackedBatch, tuple[Any, ...]]
) -> None:
    batch, (balance, square, gradients) = wanted
    metrics, found = update(OPENERS[backend], model, batch, **MANY, **changes)
    assert [metrics[name] for name in NAMES] == pytest.approx([balance, square], rel=1e-5)
    assert_gradients_alike(found, gradients)


@pytest.mark.parametrize("backend", OPENERS)
def test_losses_change_nothing_but_the_gradient_and_without_them_there_are_no_metrics(
    backend: str, model: Path
) -> None:
    """Factors of 1e-30 are below the last bit of any gradient."""
    off, gradients = update(OPENERS[backend], model, make_batch(), router_aux_loss=0.0, router_z_loss=0.0)
    tiny, same = update(OPENERS[backend], model, make_batch(), router_aux_loss=1e-30, router_z_loss=1e-30)
    assert tiny.keys() - off.keys() == set(NAMES)
    assert {name: tiny[name] for name in off} == off
    assert all(same[name].equal(gradient) for name, gradient in gradients.items())
    for one in MANY:
        _, others = update(OPENERS[backend], model, make_batch(), **{one: MANY[one]})
        routers = [name for name in gradients if name.endswith(".gate.weight")]
        assert len(routers) == (1 if "mlp" in routers[0] else 2)
        assert all((others[name] - gradients[name]).norm() > 0.1 * gradients[name].norm() for name in routers)


def test_adapters_learn_of_the_losses_though_routers_are_frozen(model: Path) -> None:
    lora = {"rank": 4, "targets": ("q_proj", "v_proj")}
    norms = [
        update(opener, model, make_batch(), lora=lora, **changes)[0]["actor/grad_norm"]
        for opener in OPENERS.values()
        for changes in ({}, MANY)
    ]
    assert norms[:2] == pytest.approx(norms[2:], rel=1e-5)
    assert abs(norms[1] / norms[0] - 1) > 1e-3


@pytest.mark.parametrize(
    ("backend", "make"), [("megatron", MegatronValueBackend), ("fsdp2", Fsdp2ValueBackend)]
)
def test_a_critic_has_no_losses_of_its_routers(backend: str, make: type, model: Path) -> None:
    found = []
    for changes in ({}, BOTH):
        critic = OPENERS[backend](model, None, make, **UNCLIPPED, **changes)
        found.append([critic.update(make_batch(), squared_error) for _ in range(2)])
        critic.close()
    assert found[0] == found[1]
    assert found[0][1]["critic/grad_norm"] > 0


@pytest.mark.parametrize("backend", OPENERS)
def test_models_whose_routers_cannot_have_losses_are_refused_by_name(backend: str, tmp_path: Path) -> None:
    dense = save_model(tmp_path / "dense")
    for name, value in BOTH.items():
        with pytest.raises(ConfigError, match="router_aux_loss, router_z_loss: the model has no experts"):
            OPENERS[backend](dense, **{name: value})
    frozen = OPENERS[backend](dense, is_frozen=True, **BOTH)
    frozen.close()


def test_fsdp2_refuses_losses_of_routers_that_it_does_not_know_or_compiles(tmp_path: Path) -> None:
    mixture = save_model(tmp_path / "mixture", "mixtral")
    with pytest.raises(ConfigError, match=r"router_z_loss: learner\.compile"):
        OPENERS["fsdp2"](mixture, compile=True, router_z_loss=0.1)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "vocab_size": 99}
    experts = {"num_experts": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
    config = Qwen2MoeConfig(**sizes, **experts, num_hidden_layers=2, num_key_value_heads=1)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "other")
    with pytest.raises(ConfigError, match="or how their router scores them is not known"):
        OPENERS["fsdp2"](tmp_path / "other", router_aux_loss=0.1)


@pytest.mark.parametrize("backend", OPENERS)
def test_the_balance_evens_the_loads_of_experts(backend: str, tmp_path: Path) -> None:
    """At first two experts of four are chosen by most tokens."""
    path = save_model(tmp_path, "mixtral") / "model.safetensors"
    weights = load_file(path)
    weights["model.embed_tokens.weight"] += 0.1
    for name, weight in weights.items():
        if name.endswith(".gate.weight"):
            weight[:2] += 0.02
    save_file(weights, path, {"format": "pt"})
    loads = []
    for aux in (0.0, 1.0):
        policy = OPENERS[backend](tmp_path, router_aux_loss=aux, lr=3e-4)
        metrics = train(policy, range(10), max_tokens=40)
        policy.close()
        loads.append([one["actor/expert_load_max"] for one in metrics])
    assert loads[0][0] == loads[1][0] > 1.7
    assert max(loads[1][-6:]) < min(loads[0][-6:]) - 0.2, loads


SHORT = {"tp_ep": {"tp": 2, "ep": 2, "recompute": "full", **SMALL}, "cp": {"cp": 2}}
LONGER = {
    "ep": {"dp": 2, "ep": 2, **SMALL},
    "pp": {"pp": 2, "recompute": "full", **SMALL},
    "fsdp2": {"dp": 2, "recompute": "full", **SMALL},
}


@pytest.fixture(scope="module")
def four_layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("four"), "qwen3_moe", num_layers=4)


@pytest.fixture(scope="module")
def alone(four_layers: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    folder = tmp_path_factory.mktemp("alone")
    return run_alone(four_layers, folder, "experts", changes=BOTH), folder


def check_layouts(world_size: int, layouts: dict[str, Any], model: Path, out: Path, alone: Any) -> None:
    assert all(name in one for one in alone[0]["metrics"] for name in NAMES)
    run_jobs(world_size, {name: changes | BOTH for name, changes in layouts.items()}, model, out)
    for name in layouts:
        check(out, name, world_size, *alone)


def test_two_ranks_have_the_losses_of_one_process(four_layers: Path, alone: Any, tmp_path: Path) -> None:
    check_layouts(2, SHORT, four_layers, tmp_path, alone)


@pytest.mark.long
def test_every_layout_of_two_ranks_has_the_losses_of_one_process(
    four_layers: Path, alone: Any, tmp_path: Path
) -> None:
    check_layouts(2, OF_TWO | LONGER, four_layers, tmp_path, alone)


@pytest.mark.long
def test_every_layout_of_four_ranks_has_the_losses_of_one_process(
    four_layers: Path, alone: Any, tmp_path: Path
) -> None:
    check_layouts(4, OF_FOUR, four_layers, tmp_path, alone)


@pytest.mark.long
def test_ranks_that_share_prompts_have_the_losses_of_packed_rows(model: Path, tmp_path: Path) -> None:
    changes = BOTH | {"shared_prompt": "off"}
    alone = run_alone(model, tmp_path, groups=LONG_PROMPTS, changes=changes)
    layouts = {
        "tp_ep": {"tp": 2, "ep": 2, "max_tokens_per_microbatch": 100},
        "pp": {"pp": 2, "recompute": "full", "max_tokens_per_microbatch": 100},
        "fsdp2": {"backend": "fsdp2", "dp": 2},
    }
    jobs = [{"name": name, "model": model, "changes": one | BOTH} for name, one in layouts.items()]
    run_ranks(2, [job | {"groups": LONG_PROMPTS} for job in jobs], tmp_path)
    for name in layouts:
        assert_trained_alike(tmp_path, name, 2, alone, tmp_path)
