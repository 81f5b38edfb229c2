"""Every cell of the table of families: engine, learner's backends, adapters and export of each one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from asyncrl.core.config.tree import Config, LoraSection
from asyncrl.core.errors import AsyncrlError, ConfigError
from asyncrl.models.architectures import FAMILIES
from asyncrl.planner.plan.models import check_adapters
from learner.batching.batch import build_batch
from learner.lora.folder import save_adapter
from rollout_service.engine.protocol import Completion, Sampling
from tests.learner.lora.adapters import in_peft, load_peft, make_adapter
from tests.learner.parts.contract import assert_equals_hugging_face, by_hugging_face
from tests.learner.parts.samples import make_groups
from tests.learner.parts.training import open_backend, open_fsdp2
from tests.rollout.engine.engine_parts import Change, LoopThread, logprobs_of, save_model, sent_tensors
from tests.rollout.engine.families import start_engine, swap
from tests.rollout.replica.flight_parts import TOLERANCE
from tests.system.families.cells import COLUMNS, ROWS, Row
from tests.system.families.page import PAGE, cells_of
from weight_sync.encoding.low_rank import A, B, factor_shapes

PROMPT, NUM_TOKENS, EXACT = [5, 60, 33, 86, 17, 2], 24, 1e-5
OPENERS = {"megatron": open_backend, "fsdp2": open_fsdp2}
CELLS = [pytest.param(family, column, id=f"{family}-{column}") for family in ROWS for column in COLUMNS]


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("family", "column"), CELLS)
def test_cell(
    family: str, column: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    row = ROWS[family]
    if (words := row.refused.get(column)) is not None:
        with pytest.raises(AsyncrlError, match=words) as refused:
            TRIED[column](row, tmp_path)
        assert isinstance(refused.value, ConfigError)
    else:
        TRIED[column](row, tmp_path)
    record_property("cell", f"no: {words}" if words else "yes")


def test_the_page_shows_what_is_tried_and_each_family_that_has_a_record() -> None:
    shown = cells_of(PAGE.read_text())
    assert shown.keys() == ROWS.keys() >= FAMILIES.keys()
    for family, row in ROWS.items():
        assert shown[family] == {
            column: f"no: {row.refused[column]}" if column in row.refused else "yes" for column in COLUMNS
        }


def save(row: Row, folder: Path) -> Path:
    """Write the family's model. Of a padding id it has none: its embedding would get no gradient."""
    model = row.form.build(0)
    model.get_input_embeddings().padding_idx = model.config.pad_token_id = None
    return save_model(model, folder)


def try_engine(row: Row, folder: Path) -> None:
    models, loop = [row.form.build(seed) for seed in (0, 1, 0)], LoopThread()
    try:
        engine = start_engine(models[0], folder, loop)
        try:
            found = [sample(engine, loop, number, model) for number, model in enumerate(models)]
        finally:
            loop.call(engine.shutdown())
    finally:
        loop.close()
    first, second, last = found
    assert first.token_ids.tolist() == last.token_ids.tolist() and list(first.logprobs) == list(last.logprobs)
    assert first.token_ids.tolist() != second.token_ids.tolist()


def try_adapters_in_engine(row: Row, folder: Path) -> None:
    base, loop = row.form.build(0), LoopThread()
    lora = LoraSection(rank=3, alpha=5.0, targets=row.targets)
    names = factor_shapes({name: tuple(one.shape) for name, one in sent_tensors(base).items()}, lora)
    try:
        engine = start_engine(base, folder, loop, lora=lora)
        try:
            for number in (1, 2):
                factors = draw(names, number)
                swap(engine, loop, number, base, change=sent(factors))
                sample(engine, loop, 0, merge(row.form.build(0), factors, lora.scale))
        finally:
            loop.call(engine.shutdown())
    finally:
        loop.close()


def draw(shapes: Mapping[str, tuple[int, ...]], seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: 0.2 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def sent(factors: Mapping[str, torch.Tensor]) -> Change:
    return lambda _: list(factors.items())


@torch.no_grad()
def merge(model: PreTrainedModel, factors: Mapping[str, torch.Tensor], scale: float) -> PreTrainedModel:
    for name, factor in factors.items():
        if name.endswith(B):
            stem = name.removesuffix(B)
            model.get_parameter(f"{stem}.weight").add_(factor @ factors[stem + A], alpha=scale)
    return model


def sample(engine: Any, loop: LoopThread, number: int, model: PreTrainedModel) -> Completion:
    if number:
        swap(engine, loop, number, model)
    sampling = Sampling(1.0, NUM_TOKENS, 7, ignores_eos=True)
    found: Completion = loop.call(engine.generate(PROMPT, sampling, f"sample-{number}"))
    model.set_attn_implementation("eager")
    wanted = logprobs_of(model, PROMPT, found.token_ids.tolist())
    assert float((torch.tensor(found.logprobs) - wanted).abs().max()) < TOLERANCE
    return found


def trying_backend(name: str) -> Callable[[Row, Path], None]:
    return lambda row, folder: assert_equals_hugging_face(save(row, folder / "model"), OPENERS[name]).close()


def trying_adapters(name: str) -> Callable[[Row, Path], None]:
    def try_them(row: Row, folder: Path) -> None:
        model = save(row, folder / "model")
        changes = {"model": {"path": str(model), "lora": {"rank": 4, "targets": row.targets}}}
        for problem in check_adapters(Config(**NEEDED | changes | {"learner": {"backend": name}})):
            raise ConfigError(problem)
        lora = make_adapter(model, folder / "adapter", targets=row.targets)
        backend, batch = OPENERS[name](model, lora=lora), build_batch(make_groups(), 0, {1: 0})
        before_N = backend.logprobs(batch)[0]
        backend.update(batch, pushing)
        trained_N = backend.logprobs(batch)[0]
        backend.save_hf(folder / "merged")
        save_adapter(str(model), folder / "trained", backend.named_tensors(), LoraSection(**lora))
        backend.close()
        assert float((trained_N - before_N).abs().max()) > 100 * EXACT
        merged_N = by_hugging_face(folder / "merged", batch, 1.0)[0]
        torch.testing.assert_close(merged_N, trained_N, rtol=0, atol=EXACT)
        torch.testing.assert_close(
            in_peft(load_peft(model, folder / "trained"), batch), trained_N, rtol=0, atol=EXACT
        )

    return try_them


def try_export(row: Row, folder: Path) -> None:
    name = "fsdp2" if "megatron" in row.refused else "megatron"
    backend, batch = OPENERS[name](save(row, folder / "model")), build_batch(make_groups(), 0, {1: 0})
    before_N = backend.logprobs(batch)[0]
    backend.update(batch, pushing)
    trained_N = backend.logprobs(batch)[0]
    backend.save_hf(folder / "trained")
    backend.close()
    assert float((trained_N - before_N).abs().max()) > 100 * EXACT
    exported_N = by_hugging_face(folder / "trained", batch, 1.0)[0]
    torch.testing.assert_close(exported_N, trained_N, rtol=0, atol=EXACT)


def pushing(logprobs_N: torch.Tensor, _entropy_N: torch.Tensor, part: Any) -> tuple[torch.Tensor, Any]:
    """Push the log-probs, some up and others down."""
    return -(logprobs_N * part.behaviour_N * part.loss_mask_N).sum() / part.totals.num_tokens, {}


NEEDED: dict[str, Any] = {
    "data": {"train": "t"},
    "reward": {"fn": "gsm8k"},
    "rollout": {"gpus": 0},
}
TRIED: dict[str, Callable[[Row, Path], None]] = {
    "vllm": try_engine,
    "megatron": trying_backend("megatron"),
    "fsdp2": trying_backend("fsdp2"),
    "lora_vllm": try_adapters_in_engine,
    "lora_megatron": trying_adapters("megatron"),
    "lora_fsdp2": trying_adapters("fsdp2"),
    "export": try_export,
}
