"""vLLM's side of a swap: loads a staged file into the worker's model. Runs inside vLLM's workers.

The names and shapes in the file must equal those of the checkpoint that the worker was started
from; that is checked before anything is overwritten. The whole load is one `update_weights` call,
because vLLM's layer-wise reload overwrites in place and keeps references to what it was given
until it is finalized: the mapping of the file has to outlive that.

Invariant: after an error no layer is left waiting for the rest of its weights, so that the next
load starts clean. The weights may be neither old nor new then; the caller keeps generation paused.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from asyncrl.errors import EngineError
from weight_sync.memory.manifest import Manifest, check_tensors
from weight_sync.memory.staging import Staged, open_tensors

Shapes = dict[str, tuple[int, ...]]
TIED_HEAD = "lm_head.weight"


@dataclass
class StagedInitInfo(WeightTransferInitInfo):
    """Nothing has to be set up: the file's path comes with each update."""


@dataclass
class StagedUpdateInfo(WeightTransferUpdateInfo):
    """One staged version, in plain values that vLLM can send to its workers."""

    path: str
    manifest: bytes


def describe_staged(staged: Staged) -> dict[str, Any]:
    """Return the fields of `StagedUpdateInfo` for `staged`."""
    return {"path": staged.path, "manifest": staged.manifest.to_bytes()}


class StagedWeightTransferEngine(WeightTransferEngine[StagedInitInfo, StagedUpdateInfo]):
    """The backend `asyncrl` of vLLM's weight-transfer API."""

    init_info_cls = StagedInitInfo
    update_info_cls = StagedUpdateInfo

    def init_transfer_engine(self, init_info: StagedInitInfo) -> None:
        """Do nothing: there is no connection."""

    def start_weight_update(self) -> None:
        """Do nothing: `receive_weights` begins the reload, once it has checked the names."""

    def finish_weight_update(self) -> None:
        """Do nothing: `receive_weights` has finalized the reload."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """As the base class does, but without synchronizing an accelerator that is not there."""
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: StagedUpdateInfo) -> None:
        """Load the staged file.

        Raises:
            SyncError: Its names or shapes do not fit, or it is gone; then nothing was overwritten.
        """
        manifest = Manifest.from_bytes(update_info.manifest)
        check_tensors(manifest, self._expected_shapes(manifest))
        tensors = list(open_tensors(Staged(manifest.version, update_info.path, manifest)))
        initialize_layerwise_reload(self.model)
        try:
            self.model.load_weights(iter(tensors))
        finally:
            finalize_layerwise_reload(self.model, self.model_config)
        # `tensors` keeps the mapping of the file until here.

    def shutdown(self) -> None:
        """Do nothing: no resource outlives an update."""

    def _expected_shapes(self, manifest: Manifest) -> Shapes:
        """Return the checkpoint's shapes; a tied head may be there or not, vLLM skips it."""
        shapes = checkpoint_shapes(Path(self.model_config.model))
        if getattr(self.model_config.hf_config, "tie_word_embeddings", False):
            shapes.pop(TIED_HEAD, None)
            shapes.update({t.name: t.shape for t in manifest.tensors if t.name == TIED_HEAD})
        return shapes


def checkpoint_shapes(folder: Path) -> Shapes:
    """Return the shape of every tensor of the safetensors checkpoint in `folder`, by name.

    Raises:
        EngineError: There is no such checkpoint.
    """
    index = folder / "model.safetensors.index.json"
    if index.exists():
        files = sorted({folder / file for file in json.loads(index.read_text())["weight_map"].values()})
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise EngineError(f"{folder} has no safetensors files", hint="Save the model with save_pretrained")
    shapes: Shapes = {}
    for file in files:
        with safe_open(file, framework="pt") as checkpoint:
            shapes.update(
                {name: tuple(checkpoint.get_slice(name).get_shape()) for name in list(checkpoint.keys())}
            )
    return shapes
