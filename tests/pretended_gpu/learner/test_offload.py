"""AdamW on the host for weights on the pretended GPU: the same updates as on the device, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from learner.megatron.optimizer.host import HostAdamW
from tests.learner.parts.samples import save_model
from tests.pretended_gpu.device.tensors import WAITS, to_gpu
from tests.pretended_gpu.learner.steps import GRAD_CLIP, result, run_on_gpu

STEP_LINE = "megatron/core/optimizer/cpu_offloading/hybrid_optimizer.py"
SIZES = (5, 300, 1)
OPTIONS: dict[str, Any] = {"lr": 0.1, "betas": (0.9, 0.95), "weight_decay": 0.1, "eps": 1e-8, "fused": True}


def values(size: int, seed: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def make_host_adamw(dtype: torch.dtype) -> tuple[HostAdamW, list[torch.Tensor], torch.optim.AdamW]:
    """Return the optimizer, its weights on the GPU, and PyTorch's own of the same values on the CPU."""
    mains = [values(size, size) for size in SIZES]
    weights = [to_gpu(main.to(dtype)) for main in mains]
    twins = [main.clone() for main in mains]
    groups = [
        {"params": weights[:1], **OPTIONS},
        {"params": [], **OPTIONS},
        {"params": weights[1:], **OPTIONS},
    ]
    host = HostAdamW(groups, dict(zip(weights, mains, strict=True)))
    return host, list(weights), torch.optim.AdamW(twins, **OPTIONS)


def step(host: HostAdamW, weights: list[torch.Tensor], twin: torch.optim.AdamW, seed: int) -> None:
    """Do the same update with both; the learning rate is that of the whole optimizer's groups."""
    for weight, copy in zip(weights, twin.param_groups[0]["params"], strict=True):
        copy.grad = values(len(copy), seed + len(copy))
        weight.decoupled_grad = to_gpu(copy.grad.clone())  # type: ignore[attr-defined]
    for group in (*host.param_groups, *twin.param_groups):
        group["lr"] = 0.1 / seed
    host.step()
    twin.step()


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_updates_on_the_host_are_adamw_s_and_the_gpu_has_the_new_weights_without_a_wait(
    dtype: torch.dtype,
) -> None:
    """Copies happen late: a gradient that is read, or memory that is used again, too early would show."""
    host, weights, twin = make_host_adamw(dtype)
    for seed in (1, 2, 3):
        WAITS.clear()
        step(host, weights, twin, seed)
        assert [line.partition(":")[0] for line in WAITS] == [STEP_LINE]
        assert WAITS.total() == len(SIZES), "once for each gradient that comes to the host"
        for weight, copy in zip(weights, twin.param_groups[0]["params"], strict=True):
            assert torch.equal(host.main(weight), copy)
            state = host.state_of(weight)
            assert all(torch.equal(state[name], value) for name, value in twin.state[copy].items())
    for weight, copy in zip(weights, twin.param_groups[0]["params"], strict=True):
        assert torch.equal(weight.cpu(), copy.to(dtype))


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_are_loaded_right_after_an_update_come_to_the_gpu(dtype: torch.dtype) -> None:
    host, weights, twin = make_host_adamw(dtype)
    step(host, weights, twin, 1)
    for weight in weights:
        host.main(weight).fill_(0.5)
    host.send_weights()
    assert all(bool((weight == 0.5).all()) for weight in weights)
    step(host, weights, twin, 2)
    assert all(torch.equal(weight.cpu(), host.main(weight).to(dtype)) for weight in weights)


def assert_same(ours: dict[str, Any], wanted: dict[str, Any], *parts: str) -> None:
    for part in ("metrics", *parts):
        assert ours[part] == wanted[part]
    assert all(one["actor/grad_norm"] > GRAD_CLIP for one in wanted["metrics"]), "all are clipped"
    assert ours["exported"].keys() == wanted["exported"].keys()
    assert all(torch.equal(tensor, wanted["exported"][name]) for name, tensor in ours["exported"].items())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a learner with a pretended GPU computes, with its optimizer on either side."""
    folder = tmp_path_factory.mktemp("offload")
    ways = ["float32", "float32:offload", "bfloat16", "bfloat16:offload", "bfloat16:raised"]
    run_on_gpu(folder, save_model(folder / "model"), ways)
    return folder


@pytest.mark.long  # 60 s: five learners
@pytest.mark.parametrize(
    ("plain", "way"),
    [("float32", "float32:offload"), ("bfloat16", "bfloat16:offload"), ("bfloat16", "bfloat16:raised")],
)
def test_a_learner_trains_goes_back_and_resumes_with_its_optimizer_on_the_host_as_on_the_gpu(
    folder: Path, plain: str, way: str
) -> None:
    """To the bit, and its checkpoint is the same file: either resumes from the other's."""
    ours, wanted = result(folder, way), result(folder, plain)
    assert_same(ours, wanted, "rolled back", "resumed")
    files = sorted(path.name for path in (folder / plain / "state").iterdir())
    assert len(files) == 2
    for name in files:
        assert (folder / way / "state" / name).read_bytes() == (folder / plain / "state" / name).read_bytes()
    step_waits = {line: num for line, num in ours["waits of a step"].items() if STEP_LINE not in line}
    assert step_waits == wanted["waits of a step"]
    assert sum(ours["waits of a step"].values()) == sum(step_waits.values()) + ours["parameters"]
    assert ours["waits of gradients"] == wanted["waits of gradients"]


@pytest.mark.long  # with the one above
def test_an_optimizer_that_goes_to_the_host_when_memory_runs_out_leaves_nothing_on_the_gpu(
    folder: Path,
) -> None:
    """The guard moves it where microbatches cannot be smaller, and gives up where that is done already."""
    found = result(folder, "bfloat16:raised")
    num_before, num_left = found["left"]
    assert num_before == 3 * found["parameters"] and num_left == 0


@pytest.mark.long  # 60 s: two ranks, each with a pretended GPU
def test_two_ranks_share_an_optimizer_on_the_host_as_they_share_one_on_their_gpus(tmp_path: Path) -> None:
    """Also where weights are gathered while the next pass computes; NCCL takes no tensor of the CPU."""
    plain = ["bfloat16:dp2:once", "bfloat16:dp2:overlap:once", "bfloat16:tp2:once", "float32:tp2:once"]
    ways = [f"{way}{more}" for way in plain for more in ("", ":offload")]
    run_on_gpu(tmp_path, save_model(tmp_path / "model"), ways, num_ranks=2)
    for way in plain:
        for rank in (0, 1):
            ours, wanted = result(tmp_path, f"{way}:offload", rank), result(tmp_path, way, rank)
            assert_same(ours, wanted)
            added = sum(ours["waits of a step"].values()) - sum(wanted["waits of a step"].values())
            assert (added < wanted["parameters"]) == ("dp2" in way), "data-parallel ranks share the updates"
            assert 0 < added <= wanted["parameters"]
