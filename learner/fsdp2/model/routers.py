"""Routers of transformers' mixtures of experts: they take recorded experts, and tell what they chose.

Owns their `forward` and that of their layers, which know the rows. A router keeps its own formula: within it
`torch.topk` gives the experts that are to be taken, with their scores. Must never guess: a router that ranks
its experts in several steps is refused once experts are recorded for it.

Shapes: N packed positions, L layers, K active experts, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from asyncrl.core.config.tree import LearnerSection
from asyncrl.core.errors import ConfigError
from asyncrl.models.architectures import find_router_problem
from learner.batching.batch import PackedBatch
from learner.batching.router_losses import attach, read_factors
from learner.batching.routing import Recorded, RouterTally, Routing, check_recorded, describe_routers
from learner.fsdp2.groups import RankGroup
from learner.fsdp2.model import attention
from learner.fsdp2.model.rows import Rows

Outputs = tuple[torch.Tensor, ...]

_RECORD = "router_logits"
"""Name under which transformers says which module of a model is a router: its first output are logits [N, E],
its last the numbers of the chosen experts [N, K]."""


class Routers:
    """Routers of the policy's layers, None of a dense layer.

    Attributes:
        problem: Why recorded experts cannot be taken; empty if they can.
        factors: Of the routers' losses, None if they have none.
    """

    factors: tuple[float, float] | None = None

    def __init__(self, routers_L: Sequence[_Router | None], num_active: int, problem: str = "") -> None:
        self._routers_L, self._num_active, self.problem = routers_L, num_active, problem
        self._num_experts = max((one.num_experts for one in routers_L if one is not None), default=0)

    @property
    def are_asked(self) -> bool:
        """Whether there are any, which want to be told of the rows."""
        return self._num_experts > 0

    def read_losses(self, section: LearnerSection, model: PreTrainedModel) -> None:
        """Raise ConfigError if routers of `model` cannot have the losses that `section` asks for."""
        problem = find_router_problem(model.config.get_text_config().to_dict()) or self.problem
        self.factors = read_factors(section, sum(one is not None for one in self._routers_L), problem)

    def check(self, batch: PackedBatch) -> None:
        """Raise ConfigError if recorded experts cannot be taken, DataError if they are wrong."""
        if batch.experts_N is None:
            return
        if self.problem:
            raise ConfigError(
                f"the recorded experts cannot be taken again on fsdp2: {self.problem}",
                hint="Leave out router replay, or train on learner.backend: megatron",
            )
        is_sparse_L = [one is not None for one in self._routers_L]
        check_recorded(batch, self._num_experts, self._num_active, is_sparse_L)

    def take_balance(self, group: RankGroup) -> dict[str, float]:
        """Return the metrics of all routers since they were last taken, over all ranks. Collective."""
        if not self.are_asked:
            return {}
        tallies = [RouterTally() if one is None else one.tally for one in self._routers_L]
        sums_LS = torch.stack([tally.take(self._num_experts, group.device) for tally in tallies])
        return describe_routers(group.all_reduce(sums_LS))


def attach_routers(
    model: PreTrainedModel, layers: Sequence[torch.nn.Module], *, is_packed: bool, is_compiled: bool
) -> Routers:
    """Take over the routers of `layers`, before those are cut; of a dense model there are none."""
    kind = getattr((model._can_record_outputs or {}).get(_RECORD), "target_class", None)
    found = [[one for one in layer.modules() if kind is not None and type(one) is kind] for layer in layers]
    num_active = getattr(model.config.get_text_config(), "num_experts_per_tok", None) or 0
    problems = {
        "learner.compile would compile each choice anew": is_compiled,
        f"{type(model).__name__} runs padded rows": not is_packed,
        f"{type(model).__name__} has a layer with several routers": any(len(one) > 1 for one in found),
        f"transformers does not say which module of {type(model).__name__} is a router": num_active > 0
        and not any(found),
    }
    problem = next((problem for problem, is_so in problems.items() if is_so), "")
    if problem or not any(found):
        return Routers([None] * len(layers), num_active, problem)
    return Routers(
        [
            _Router(layer, one[0], index) if one else None
            for index, (layer, one) in enumerate(zip(layers, found, strict=True))
        ],
        num_active,
    )


class _Router:
    """One router, and the layer that tells it of the rows; the layer does so where it is recomputed too."""

    def __init__(self, layer: torch.nn.Module, module: torch.nn.Module, index: int) -> None:
        weight = module.weight
        assert isinstance(weight, torch.Tensor)
        self.tally, self.num_experts = RouterTally(), weight.shape[0]
        self._name, self._index = type(module).__name__, index
        self._run: Callable[..., object] = layer.forward
        self._route: Callable[..., Outputs] = module.forward
        self._routing: Routing | None = None
        layer.forward, module.forward = self.run_layer, self.route

    def run_layer(self, *inputs: object, **options: object) -> object:
        rows = options.get(attention.NAME)
        self._routing = rows.routing if isinstance(rows, Rows) else None
        return self._run(*inputs, **options)

    def route(self, *inputs: torch.Tensor) -> Outputs:
        routing = self._routing
        if routing is None:
            return self._route(*inputs)
        recorded = None if routing.experts_NLK is None else Recorded(routing.experts_NLK[:, self._index])
        outputs = self._route(*inputs) if recorded is None else route_by(recorded, self._route, *inputs)
        if torch.is_grad_enabled():  # all positions twice where layers are recomputed: the metrics are shares
            logits_NE, values, *others = outputs
            is_chosen_NE = torch.zeros_like(logits_NE, dtype=torch.bool).scatter(1, outputs[-1], True)
            values, sums = attach(values, routing, logits_NE, is_chosen_NE)
            outputs = logits_NE, values, *others
            self.tally.add(logits_NE.detach(), is_chosen_NE, routing, recorded, sums)
        return outputs


class _Choice(TorchFunctionMode):
    """Within it `torch.topk` takes recorded experts."""

    def __init__(self, recorded: Recorded) -> None:
        super().__init__()
        self._recorded, self.num_rankings = recorded, 0

    def __torch_function__(
        self,
        func: Callable[..., Outputs],
        _types: object,
        args: Outputs = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> Outputs:
        found = func(*args, **(kwargs or {}))
        if func not in (torch.topk, torch.Tensor.topk):
            return found
        self.num_rankings += 1
        if found[1].shape != self._recorded.shape:
            return found  # of groups; such a router is refused below
        chosen_NK = self._recorded.choose(found[1])
        return args[0].gather(-1, chosen_NK), chosen_NK


def route_by(recorded: Recorded, route: Callable[..., Outputs], *inputs: torch.Tensor) -> Outputs:
    """Return the outputs of `route` with the experts of `recorded`, or raise ConfigError."""
    with _Choice(recorded) as choice:
        outputs = route(*inputs)
    if choice.num_rankings != 1:
        raise ConfigError(
            f"a router ranks experts in {choice.num_rankings} steps: the recorded ones cannot be taken again",
            hint="Leave out router replay, or train on learner.backend: megatron",
        )
    return outputs
