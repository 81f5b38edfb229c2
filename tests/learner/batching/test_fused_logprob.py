"""The fused log-prob against the plain way: logits, log_softmax, autograd."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from asyncrl.control.machine.ports import HeldPort
from learner.numerics import fused_logprob
from learner.numerics.fused_logprob import fused_logprobs

ROOT = Path(__file__).resolve().parents[3]
VOCAB, PADDED = 1000, 1024
TEMPERATURE = 0.7


@pytest.fixture(params=[1 << 26, 0], ids=["kept", "made again"])
def small_tiles(monkeypatch, request):
    """Tiles of 64 entries and 8 tokens, that are kept for the backward pass or made again there."""
    monkeypatch.setitem(fused_logprob.KEPT_ELEMENTS, "cpu", request.param)
    monkeypatch.setitem(fused_logprob.TILE_ENTRIES, "cpu", 64)
    monkeypatch.setitem(fused_logprob.TILE_ELEMENTS, "cpu", 512)


def make_inputs(num_tokens=37, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    hidden_NH = torch.randn(num_tokens, 48, generator=generator)
    weight_VH = torch.randn(PADDED, 48, generator=generator) * 0.4
    labels_N = torch.randint(0, VOCAB, (num_tokens,), generator=generator)
    labels_N[:2] = torch.tensor([0, VOCAB - 1])
    return hidden_NH.to(dtype), weight_VH.to(dtype), labels_N


def make_gradients(num_tokens=37):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, num_tokens, generator=generator)


def plain(hidden_NH, weight_VH, labels_N):
    logits_NV = hidden_NH.float() @ weight_VH[:VOCAB].float().T / TEMPERATURE
    logp_NV = logits_NV.log_softmax(-1)
    return logp_NV.gather(1, labels_N[:, None])[:, 0], -(logp_NV.exp() * logp_NV).sum(-1)


def plain_squares(hidden_NH, weight_VH, num_entries=VOCAB, temperature=TEMPERATURE):
    logits_NV = hidden_NH.double() @ weight_VH[:num_entries].double().T / temperature
    return logits_NV.softmax(-1).square().sum(-1).float()


def fused(hidden_NH, weight_VH, labels_N, group=None, **options):
    return fused_logprobs(
        hidden_NH, weight_VH, labels_N, vocab_size=VOCAB, temperature=TEMPERATURE, group=group, **options
    )


def differentiate(function, hidden_NH, weight_VH, labels_N, used=(0, 1)):
    """Return the outputs and the gradients of hidden and weight under fixed output gradients."""
    hidden_NH, weight_VH = hidden_NH.clone().requires_grad_(), weight_VH.clone().requires_grad_()
    outputs = function(hidden_NH, weight_VH, labels_N)
    gradients = make_gradients(len(labels_N))
    torch.autograd.backward([outputs[index] for index in used], [gradients[index] for index in used])
    return *(output.detach() for output in outputs), hidden_NH.grad, weight_VH.grad


def assert_same(found, expected, atol=1e-5):
    for ours, reference in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-5, atol=atol)


@pytest.mark.parametrize("used", [(0, 1), (0,), (1,)], ids=["both", "logprob", "entropy"])
def test_values_and_both_gradients_equal_the_plain_way(small_tiles, used):
    inputs = make_inputs()
    assert_same(differentiate(fused, *inputs, used), differentiate(plain, *inputs, used))


@pytest.mark.parametrize("chunk_tokens", [1, 5, 37, 100])
def test_the_cut_into_tiles_changes_rounding_only(small_tiles, chunk_tokens):
    inputs = make_inputs()
    found = differentiate(lambda *args: fused(*args, chunk_tokens=chunk_tokens), *inputs)
    assert_same(found, differentiate(plain, *inputs))


def test_logits_that_rise_from_tile_to_tile_stay_exact(small_tiles):
    hidden_NH, weight_VH, labels_N = make_inputs()
    weight_VH[:, 0] += torch.linspace(-40, 40, PADDED)
    hidden_NH[:, 0] = 1.0
    inputs = (hidden_NH, weight_VH, labels_N)
    found, expected = differentiate(fused, *inputs), differentiate(plain, *inputs)
    assert expected[0].min() < -80
    assert_same(found, expected, atol=2e-4)  # float32 has 1e-5 at 100, and the weights are up to 40


def test_padding_entries_never_enter_the_softmax(small_tiles):
    hidden_NH, weight_VH, labels_N = make_inputs()
    expected = differentiate(plain, hidden_NH, weight_VH, labels_N)
    weight_VH[VOCAB:] = 1e4
    found = differentiate(fused, hidden_NH, weight_VH, labels_N)
    assert_same(found[:3], expected[:3])
    assert not found[3][VOCAB:].any()


def test_half_precision_inputs_are_summed_in_float32(small_tiles):
    inputs = make_inputs(dtype=torch.bfloat16)
    found, expected = differentiate(fused, *inputs), differentiate(plain, *inputs)
    assert found[0].dtype is found[1].dtype is torch.float32
    assert found[2].dtype is found[3].dtype is torch.bfloat16
    assert_same(found[:2], expected[:2])
    for ours, reference in zip(found[2:], expected[2:], strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-2, atol=1e-4)  # one rounding to bfloat16


def test_a_call_without_tokens_gives_nothing_and_zero_gradients():
    hidden_NH, weight_VH, labels_N = make_inputs()
    outputs = differentiate(fused, hidden_NH[:0], weight_VH, labels_N[:0])
    assert [len(output) for output in outputs[:3]] == [0, 0, 0]
    assert not outputs[3].any()


def test_exponentials_are_kept_only_where_they_fit_and_a_gradient_is_wanted(monkeypatch):
    hidden_NH, weight_VH, labels_N = make_inputs()
    assert fused(hidden_NH, weight_VH, labels_N)[0].grad_fn is None
    weight_VH.requires_grad_()
    for num_elements, num_kept in ((37 * VOCAB - 1, 0), (37 * VOCAB, 1)):
        monkeypatch.setitem(fused_logprob.KEPT_ELEMENTS, "cpu", num_elements)
        logprobs_N = fused(hidden_NH, weight_VH, labels_N)[0]
        assert len(logprobs_N.grad_fn.kept) == num_kept
        logprobs_N.sum().backward()
        assert logprobs_N.grad_fn.kept == []
    options = {"vocab_size": VOCAB, "temperature": 1.0, "group": None, "chunk_tokens": 0}
    with torch.no_grad():
        plan = fused_logprob._make_plan(
            hidden_NH, weight_VH, **options, reduce_hidden_grad=True, has_squares=False
        )
    assert not plan.is_kept


def test_a_second_pass_over_a_retained_graph_gives_the_same_gradient(small_tiles):
    hidden_NH, weight_VH, labels_N = make_inputs()
    weight_VH.requires_grad_()
    total = fused(hidden_NH, weight_VH, labels_N)[0].sum()
    first, second = (torch.autograd.grad(total, weight_VH, retain_graph=True)[0] for _ in range(2))
    torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-5)


def test_an_entry_without_any_probability_gets_an_entropy_gradient_of_zero(small_tiles):
    hidden_NH, weight_VH, labels_N = make_inputs()
    weight_VH[:, 0] += torch.linspace(-300, 0, PADDED)
    hidden_NH[:, 0] = 1.0
    assert (plain(hidden_NH, weight_VH, labels_N)[0] < -120).any()  # exp gives 0 in float32
    found = differentiate(fused, hidden_NH, weight_VH, labels_N)
    assert_same(found, differentiate(plain, hidden_NH, weight_VH, labels_N), atol=2e-3)


def test_only_the_gradients_that_are_wanted_are_made(small_tiles):
    hidden_NH, weight_VH, labels_N = make_inputs()
    expected = differentiate(plain, hidden_NH, weight_VH, labels_N)
    weight_VH.requires_grad_()
    torch.autograd.backward(fused(hidden_NH, weight_VH, labels_N), [*make_gradients()])
    assert hidden_NH.grad is None
    torch.testing.assert_close(weight_VH.grad, expected[3], rtol=1e-5, atol=1e-5)


def test_squared_probabilities_are_those_of_a_plain_softmax(small_tiles):
    hidden_NH, weight_VH, labels_N = make_inputs()
    weight_VH[:VOCAB, 0] += torch.linspace(-3, 3, VOCAB)  # the maximum moves from tile to tile
    *others, squares_N = fused(hidden_NH, weight_VH, labels_N, has_squares=True)
    expected_N = plain_squares(hidden_NH, weight_VH)
    assert expected_N.min() < 0.1 < expected_N.max()
    torch.testing.assert_close(squares_N, expected_N, rtol=1e-5, atol=1e-5)
    assert_same(others, fused(hidden_NH, weight_VH, labels_N), atol=0)
    weight_VH[VOCAB:] = 1e4
    assert torch.equal(fused(hidden_NH, weight_VH, labels_N, has_squares=True)[2], squares_N)


def test_squared_probabilities_carry_no_gradient_and_leave_those_of_the_others_alone(small_tiles):
    inputs = make_inputs()
    found = differentiate(lambda *args: fused(*args, has_squares=True), *inputs)
    expected = differentiate(fused, *inputs)
    assert_same((*found[:2], *found[3:]), expected, atol=0)
    assert not fused(inputs[0].requires_grad_(), *inputs[1:], has_squares=True)[2].requires_grad


@pytest.mark.long
def test_a_vocabulary_split_over_two_processes_gives_the_same_on_both(tmp_path):
    port = HeldPort()
    command = [
        sys.executable,
        "-m",
        "tests.learner.batching.test_fused_logprob",
        str(tmp_path),
        str(port.number),
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen([*command, str(rank)], cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        for process in processes:
            _, errors = process.communicate(timeout=120)
            assert process.returncode == 0, errors[-4000:]
    finally:
        for process in processes:
            process.kill()
        port.close()
    expected = differentiate(plain, *make_inputs())
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    for one in found:
        assert_same(one["whole"][:3], expected[:3])
        assert one["num_reductions"] == 3  # MAX and SUM forward, one SUM backward
    assert_same([torch.cat([one["whole"][3] for one in found])], expected[3:])
    # Without the reduction each rank holds its own part of the hidden gradient.
    assert_same([found[0]["part"][2] + found[1]["part"][2]], expected[2:3])
    expected_N = plain_squares(*make_inputs()[:2])
    for one in found:
        torch.testing.assert_close(one["squares"][2], expected_N, rtol=1e-5, atol=1e-5)
        assert one["num_reductions_of_squares"] == 2  # they go along
    # All entries of the second rank are padding: nothing of it may enter.
    hidden_NH, weight_VH, labels_N = make_inputs()
    few = differentiate(plain_of_few, hidden_NH, weight_VH, labels_N % FEW)
    for one in found:
        assert_same(one["few"][:3], few[:3])
    assert not found[1]["few"][3].any()


FEW = 300


def plain_of_few(hidden_NH, weight_VH, labels_N):
    logp_NV = (hidden_NH @ weight_VH[:FEW].T).log_softmax(-1)
    return logp_NV.gather(1, labels_N[:, None])[:, 0], -(logp_NV.exp() * logp_NV).sum(-1)


def run_rank(folder, port, rank):
    """Be one of two tensor-parallel ranks and write what comes out."""
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", world_size=2, rank=rank)
    group = dist.group.WORLD
    fused_logprob.TILE_ENTRIES["cpu"] = 64
    hidden_NH, weight_VH, labels_N = make_inputs()
    mine_VH = weight_VH.chunk(2)[rank]
    reductions = []
    plain_all_reduce = dist.all_reduce

    def count(*args, **options):
        reductions.append(args)
        return plain_all_reduce(*args, **options)

    dist.all_reduce = count
    whole = differentiate(lambda *args: fused(*args, group=group), hidden_NH, mine_VH, labels_N)
    num_reductions = len(reductions)
    part = differentiate(
        lambda *args: fused(*args, group=group, reduce_hidden_grad=False), hidden_NH, mine_VH, labels_N
    )
    few = differentiate(
        lambda *args: fused_logprobs(*args, vocab_size=FEW, temperature=1.0, group=group),
        hidden_NH,
        mine_VH,
        labels_N % FEW,
    )
    reductions.clear()
    squares = fused(hidden_NH, mine_VH, labels_N, group, has_squares=True)
    results = {
        "whole": whole,
        "part": part,
        "few": few,
        "num_reductions": num_reductions,
        "squares": squares,
        "num_reductions_of_squares": len(reductions),
    }
    torch.save(results, folder / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    run_rank(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
