"""Weights of a Hugging Face model on disk, for a module that is built without them.

transformers builds the module uninitialised: memory that nobody has written takes no room. Its layers hold
their stored weights only while they compute, and once the module is cut each rank reads its rows of each
tensor. Invariant: no rank ever holds more of the model than one layer, what is in no layer, and its shards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from transformers import PreTrainedModel

from asyncrl.core.errors import ConfigError
from learner.checkpoint.pretrained import PretrainedTensors
from learner.fsdp2.model.stacked import StoredNames
from learner.fsdp2.sharding import ShardedParameter


class StoredWeights:
    """Stored tensors of the parameters of `wanted`, a part of `model`; its kept buffers are filled at once.

    Attributes:
        kept: Those buffers as they are stored, by their stored names: no loss trains them.

    Raises:
        ConfigError: The folder holds other tensors than the module has.
    """

    def __init__(self, model: PreTrainedModel, tensors: PretrainedTensors, wanted: torch.nn.Module) -> None:
        inside = {id(tensor) for tensor in (*wanted.parameters(), *wanted.buffers())}
        kept = model.state_dict(keep_vars=True)
        buffers = {name: buffer for name, buffer in model.named_buffers() if name in kept}
        self._tensors, self.stored_names = tensors, StoredNames.of(model.config)
        self._names: dict[torch.Tensor, str] = {}  # tied parameters come once
        self.kept: dict[str, torch.Tensor] = {}
        for name, target in (*model.named_parameters(), *buffers.items()):
            if id(target) not in inside:
                continue
            stored = self.stored_names.read(tensors, name, target)
            if stored.shape != target.shape:
                raise ConfigError(
                    f"'{name}' is stored as {tuple(stored.shape)}, the model has {tuple(target.shape)}",
                    hint="Its config.json describes another model",
                )
            if name in buffers:
                target.copy_(stored)
                parts = self.stored_names.split(name, stored.clone(), 0, tuple(stored.shape))
                self.kept |= {part.name: part.values for part in parts}
            else:
                self._names[target] = name

    @contextmanager
    def lent(self, layers: Sequence[torch.nn.Module]) -> Iterator[None]:
        """Let the model compute within the block; each of `layers` has its weights while it runs."""
        in_layers = {parameter for layer in layers for parameter in layer.parameters()}
        with ExitStack() as stack:
            stack.enter_context(self._held([one for one in self._names if one not in in_layers]))
            for layer in layers:
                stack.enter_context(self._held_while_running(layer))
            yield

    @torch.no_grad()
    def fill(self, parameters: Sequence[ShardedParameter]) -> None:
        """Read this rank's rows of the parameters that are stored.

        Raises:
            AssertionError: A stored tensor belongs to none of them: its parameter would keep whatever the
                memory held.
        """
        stored = set(self._names.values())
        unread = stored - {parameter.name for parameter in parameters}
        assert not unread, f"no parameter is called {', '.join(sorted(unread))}"
        for parameter in parameters:
            if parameter.name in stored:
                shard = parameter.shard
                shard.copy_(self.stored_names.read(self._tensors, parameter.name, shard, parameter.start))

    @contextmanager
    def _held(self, parameters: Sequence[torch.Tensor]) -> Iterator[None]:
        before = [(one, one.data) for one in parameters if one in self._names]
        for one, _ in before:
            stored = self.stored_names.read(self._tensors, self._names[one], one)
            one.data = stored.to(torch.float32, copy=True)
        try:
            yield
        finally:
            for one, untouched in before:
                one.data = untouched

    @contextmanager
    def _held_while_running(self, layer: torch.nn.Module) -> Iterator[None]:
        running = ExitStack()

        def begin(*_: object) -> None:
            running.enter_context(self._held(list(layer.parameters())))

        def end(*_: object) -> None:
            running.close()

        hooks = [
            layer.register_forward_pre_hook(begin),
            layer.register_forward_hook(end, always_call=True),
        ]
        try:
            yield
        finally:
            running.close()
            for hook in hooks:
                hook.remove()
