"""vLLM's side of a swap: loads a staged version into the worker's model. Runs inside vLLM's workers.

A version lies in a file, or in stages of the workers that have received it themselves (`worker_seat`). Its
names, shapes and dtypes must be those of the checkpoint that the worker was started from; that is checked
before anything is overwritten. The whole load is one `update_weights` call,
because vLLM's layer-wise reload overwrites in place and keeps references to what it was given
until it is finalized: the mapping of the file has to outlive that. Workers that share a model take
each stage together: one that cannot go on stops all of them. On a GPU a worker's slices go there through
pinned buffers, out of the mapped file, and need no memory of the GPU on the way.

A load never raises into vLLM: its executor for several workers reads no further reply after the first
failure, and the unread ones are taken for the answers to later calls. How a load ended is asked for.
Invariant: after an error no layer is left waiting for the rest of its weights, so that the next
load starts clean. The weights may be neither old nor new then; the caller keeps generation paused.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import astuple, dataclass, field
from functools import cached_property, partial
from pathlib import Path

import torch
from vllm.distributed.parallel_state import get_world_group
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from asyncrl.core.config.tree import LoraSection
from asyncrl.core.errors import SyncError
from asyncrl.core.runtime.faults import is_wanted
from asyncrl.core.sockets.keys import ClientKeys
from rollout_service.engine.checkpoint import CheckpointTensor, check_version, read_tensors, read_values
from rollout_service.engine.probe import measure_logprobs
from rollout_service.engine.probe_check import ProbeCheck, name_of
from rollout_service.engine.vllm.nodes.relay import Relay
from rollout_service.engine.vllm.plugin import OTHER_WORKER, QUANTIZATIONS
from rollout_service.engine.vllm.reload import find_refused, find_shared, reload
from rollout_service.engine.vllm.worker_seat import WorkerSeat
from weight_sync.copies.pinned import BUFFER_BYTES, PinnedPipeline
from weight_sync.copies.to_gpu import PinnedCopies
from weight_sync.direct.seat import DeskAddress
from weight_sync.encoding.low_rank import factor_shapes, merge_factors
from weight_sync.memory.manifest import Manifest
from weight_sync.memory.staging import Staged, open_tensors

log = logging.getLogger(__name__)

Tensors = Iterable[tuple[str, torch.Tensor]]


@dataclass
class StagedInitInfo(WeightTransferInitInfo):
    """Nothing has to be set up: the file's path comes with each update."""


@dataclass
class StagedUpdateInfo(WeightTransferUpdateInfo):
    """One staged version, in plain values that vLLM can send to its workers.

    Attributes:
        path: Empty if the workers hold the version themselves.
        desk, desk_keys: Of the `DeskAddress`, whose keys are three; empty without one.
        lora: Of `model.lora`, if versions hold adapters alone; else empty.
    """

    path: str
    manifest: bytes
    desk: str = ""
    desk_keys: Sequence[bytes] = field(default=(), repr=False)
    lora: Mapping[str, object] = field(default_factory=dict)

    @property
    def desk_address(self) -> DeskAddress | None:
        if not self.desk:
            return None
        return DeskAddress(self.desk, ClientKeys(*self.desk_keys) if self.desk_keys else None)


def describe_staged(staged: Staged, lora: LoraSection | None = None) -> dict[str, object]:
    """Return the fields of `StagedUpdateInfo` for `staged`."""
    described: dict[str, object] = {"path": staged.path, "manifest": staged.manifest.to_bytes()}
    if lora is not None and lora.rank:
        described["lora"] = lora.model_dump()
    if staged.desk is not None:
        keys = staged.desk.keys
        described |= {"desk": staged.desk.address, "desk_keys": astuple(keys) if keys is not None else ()}
    return described


class StagedWeightTransferEngine(WeightTransferEngine[StagedInitInfo, StagedUpdateInfo]):
    """The backend `asyncrl` of vLLM's weight-transfer API."""

    init_info_cls = StagedInitInfo
    update_info_cls = StagedUpdateInfo
    outcome = ""
    """Error of the last load of this worker; empty if there was none."""

    @cached_property
    def _seat(self) -> WorkerSeat:
        return WorkerSeat()

    @cached_property
    def probe_check(self) -> ProbeCheck:
        return ProbeCheck()

    @cached_property
    def _pipeline(self) -> PinnedPipeline:
        """Pinned once: to pin memory takes longer than a load."""
        return PinnedPipeline(BUFFER_BYTES)

    def init_transfer_engine(self, init_info: StagedInitInfo) -> None:
        """Do nothing: there is no connection."""

    def start_weight_update(self) -> None:
        """Do nothing: `receive_weights` begins the reload, once it has checked the names."""

    def finish_weight_update(self) -> None:
        """Do nothing: `receive_weights` has finalized the reload."""

    def update_weights(self, update_info: dict[str, object]) -> None:
        """Load, and keep in `outcome` what went wrong. No accelerator is waited for that is not there."""
        try:
            self.receive_weights(self.parse_update_info(update_info))
            self.outcome = ""
        except Exception as error:  # of any kind: see the module
            log.exception("a load failed")
            self.outcome = f"{type(error).__name__}: {error}"
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: StagedUpdateInfo) -> None:
        """Load the staged version, and let the probe judge if it brings one.

        Raises:
            SyncError: Its names, shapes or dtypes do not fit, or it is gone; then nothing was overwritten.
                Or the load or the probe failed, here or on another worker of this model.
        """
        with self._together("check the tensors"):
            manifest = Manifest.from_bytes(update_info.manifest)
            lora = LoraSection.model_validate(update_info.lora) if update_info.lora else None
            self._check(manifest, lora)
        device = next(self.model.parameters()).device
        with self._carried(update_info.path, manifest) as path:
            with self._together("open the version"):
                tensors = self._open(manifest, path)
            with self._together("load"), self._seat.taken_after(update_info.desk_address, tensors, device):
                self._load(manifest.version.number, tensors if lora is None else self._merge(tensors, lora))
        if manifest.probe is not None:
            with self._together("match the probe"):
                measure = partial(measure_logprobs, self.model, self.vllm_config)
                self.probe_check.check(measure, self._precision, manifest.probe, manifest.version.step)

    def shutdown(self) -> None:
        """Give up the seat: no other resource outlives an update."""
        self._seat.leave()

    @property
    def _precision(self) -> str:
        by_name = {name: precision for precision, name in QUANTIZATIONS.items()}
        return by_name.get(self.model_config.quantization, name_of(self.model_config.dtype))

    def _carried(self, path: str, manifest: Manifest) -> AbstractContextManager[str]:
        """Bring the file, if there is one, to this worker's node."""
        per_node = self.parallel_config.local_world_size
        if not path or per_node == self.parallel_config.world_size:
            return nullcontext(path)
        return Relay(get_world_group().cpu_group, per_node, self._together).carried(path, manifest)

    def _open(self, manifest: Manifest, path: str) -> Tensors:
        """Return the tensors of the file, or those of this worker's stage, which are made one by one."""
        if path:
            return list(open_tensors(Staged(manifest.version, path, manifest)))
        return self._seat.stages.tensors(manifest.version.number, manifest.layout)

    def _check(self, manifest: Manifest, lora: LoraSection | None) -> None:
        """Compare with the checkpoint. A parameter of several modules is sent once, by its first name."""
        expected = read_tensors(Path(self.model_config.model))
        for first, *others in find_shared(self.model):
            if first.full_name in expected:
                for other in others:  # some checkpoints hold a copy
                    expected.pop(other.full_name, None)
        served = name_of(self.model_config.dtype)
        if lora is not None:
            shapes = factor_shapes({name: tensor.shape for name, tensor in expected.items()}, lora)
            expected = {name: CheckpointTensor(shape, served) for name, shape in shapes.items()}
        check_version(manifest, expected, served)

    def _merge(self, factors: Tensors, lora: LoraSection) -> Tensors:
        """Return all tensors of the version: those of the checkpoint, with the factors merged into them."""
        base = read_values(Path(self.model_config.model))
        device = next(self.model.parameters()).device
        return merge_factors(base, dict(factors), lora.scale, self.model_config.dtype, device)

    def _load(self, number: int, tensors: Tensors) -> None:
        """Overwrite the model. Layers refer to `tensors`, and so to the file, until they are finalized."""
        with self._sent_to(next(self.model.parameters()).device):
            reload(self.model, self.model_config, _with_faults(number, tensors))

    def _sent_to(self, device: torch.device) -> AbstractContextManager[object]:
        """Send the slices that the loader copies to `device` through pinned buffers, if it is a GPU."""
        return PinnedCopies(self._pipeline) if device.type == "cuda" else nullcontext()

    @contextmanager
    def _together(self, stage: str) -> Iterator[None]:
        """Run the block on all workers of the model; if one raises, all do.

        Else one worker would overwrite what another refuses. The adapter's deadline bounds the wait for them.
        """
        if self.parallel_config.world_size == 1:
            yield
            return
        error: Exception | None = None
        try:
            yield
        except Exception as caught:  # whatever it is, the others must hear of it; it is raised below
            error = caught
        num_failed = torch.tensor([int(error is not None)])
        torch.distributed.all_reduce(num_failed, group=get_world_group().cpu_group)
        if error is not None:
            raise error
        if num_failed:
            raise SyncError(f"{OTHER_WORKER} could not {stage}")


class LoadReporter:
    """Mixed into vLLM's workers as their `worker_extension_cls`: tells the adapter how a load ended."""

    weight_transfer_engine: StagedWeightTransferEngine

    def report_staged_load(self) -> tuple[str, float | None]:
        """Return why the last load of this worker failed, empty if it did not, and the gap of the probe."""
        engine = self.weight_transfer_engine
        return engine.outcome, engine.probe_check.gap

    def report_refused_modules(self) -> list[str]:
        """Return why loads into this worker's model would not be right, by module."""
        engine = self.weight_transfer_engine
        return list(find_refused(engine.model, engine.model_config))


def _with_faults(number: int, tensors: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors; a test may have the load of version `number` fail at one of them, on one worker."""
    rank = get_world_group().rank
    for index, tensor in enumerate(tensors):
        if is_wanted("engine.load", number, index, rank):
            raise SyncError(f"the load of version {number} was told to fail at tensor {index}")
        yield tensor
