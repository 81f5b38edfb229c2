"""vLLM models of any tensor, pipeline and expert rank in one process: its groups are stand-ins."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import vllm.distributed.parallel_state
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    LoadConfig,
    ModelConfig,
    ParallelConfig,
    VllmConfig,
    set_current_vllm_config,
)
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.utils.torch_utils import set_default_torch_dtype

from tests.weight_sync.rectangles.models import Model

GROUPS = (
    "_WORLD",
    "_TP",
    "_PP",
    "_DP",
    "_EP",
    "_DCP",
    "_PCP",
    "_ETP",
    "_EPLB",
    "_INNER_DP_WORLD",
    "_ENGRAM_DP",
)


class Group:
    """Answers what a model asks of a group while it is built and loaded: ranks and sizes, no collective."""

    device_communicator = None
    use_device_communicator = False
    unique_name = "stand-in:0"
    device = torch.device("cpu")

    def __init__(self, rank: int, size: int) -> None:
        self.rank = self.rank_in_group = self.local_rank = rank
        self.world_size = size
        self.ranks = list(range(size))
        self.first_rank, self.last_rank = 0, size - 1
        self.is_first_rank, self.is_last_rank = rank == 0, rank == size - 1
        processes = mock.Mock(spec=["rank", "size"])
        processes.rank.return_value, processes.size.return_value = rank, size
        self.device_group = self.cpu_group = processes


class Worker:
    """One rank of an engine of `tp` times `pp` ranks; with `has_ep` the tensor ranks divide the experts."""

    def __init__(
        self, model: Model, tp: tuple[int, int], pp: tuple[int, int] = (0, 1), *, has_ep: bool = False
    ) -> None:
        self._model, self._tp, self._pp, self._has_ep = model, tp, pp, has_ep

    @contextmanager
    def _as_rank(self) -> Iterator[None]:
        """Have vLLM take this process for the rank."""
        groups: dict[str, Any] = dict.fromkeys(GROUPS, Group(0, 1))
        groups |= dict.fromkeys(("_TP", "_ETP", "_WORLD", "_EP"), Group(*self._tp))
        groups["_PP"] = Group(*self._pp)
        with ExitStack() as stack:
            for name, group in groups.items():
                patch = mock.patch.object(vllm.distributed.parallel_state, name, group, create=True)
                stack.enter_context(patch)
            yield

    def _build(self) -> torch.nn.Module:
        """Return its model before any weights are loaded: all NaN."""
        with self._as_rank():
            config = self._config()
            with (
                set_current_vllm_config(config),
                set_default_torch_dtype(torch.bfloat16),
                torch.device("cpu"),
            ):
                model = initialize_model(config)
        for parameter in model.parameters():
            parameter.data.fill_(torch.nan)
        return model

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Return the parameters of a new model that has loaded `tensors`."""
        built = self._build()
        with self._as_rank():
            built.load_weights(tensors)
        return {name: parameter.data for name, parameter in built.named_parameters()}

    def _config(self) -> VllmConfig:
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "config.json").write_text(json.dumps(self._model.config()))
            model_config = ModelConfig(
                model=folder,
                tokenizer=folder,
                skip_tokenizer_init=True,
                dtype=torch.bfloat16,
                max_model_len=128,
                enforce_eager=True,
            )
            config = VllmConfig(
                model_config=model_config,
                cache_config=CacheConfig(),
                load_config=LoadConfig(),
                device_config=DeviceConfig(device="cpu"),
            )
        parallel = ParallelConfig()
        sizes = {
            "tensor_parallel_size": self._tp[1],
            "pipeline_parallel_size": self._pp[1],
            "enable_expert_parallel": self._has_ep,
            "rank": self._tp[0],
        }
        for name, value in sizes.items():  # its own checks want a device for each rank
            object.__setattr__(parallel, name, value)
        config.parallel_config = parallel
        return config
