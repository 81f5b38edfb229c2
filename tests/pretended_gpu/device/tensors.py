"""Tensors of a pretended GPU: they say that they are on `cuda:0` and hold their values on the CPU.

As on a GPU, an operation that mixes them with a tensor of the CPU raises, and so does, under deterministic
algorithms, one that has none; each place where the host waits for the device is counted by line. Invariant:
values are those of the same operations on the CPU.
"""

from __future__ import annotations

import contextlib
import os
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map

from tests.pretended_gpu.device.streams import STREAMS

GPU = torch.device("cuda", 0)
_UNDERNEATH = torch.device("meta")
"""Device that PyTorch's core sees: it knows none of a GPU that is not there."""
_NAMES = (GPU.type, _UNDERNEATH.type)
WAITS: Counter[str] = Counter()
"""Times that the host waited for the device, by file and line."""
NCCL: list[bool] = []
"""Not empty: the backend of torch.distributed stands for NCCL, which takes tensors of a GPU alone."""
PACKAGES = ("/learner/", "/weight_sync/", "/rollout_service/", "/megatron/")
_COPYING = ("aten::_to_copy", "aten::copy_")
_READS = (
    "aten::_local_scalar_dense",
    "aten::equal",
    "aten::is_nonzero",
    "aten::nonzero",
    "aten::masked_select",
    "aten::_unique2",
    "aten::unique_dim",
    "aten::bincount",
)
"""Operations whose result, or its shape, the host needs."""
_INDEXING = ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_")
"""They take index tensors of the CPU, and wait for them to be copied."""
_PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")
"""Of cuBLAS, which repeats its results with a workspace of fixed size alone."""
_UNREPEATABLE: Mapping[str, Callable[..., bool]] = {
    "aten::cumsum": lambda x, *_, **__: x.is_floating_point(),
    "aten::cumsum_": lambda x, *_, **__: x.is_floating_point(),
    "aten::bincount": lambda x, weights=None, *_: weights is not None,
    "aten::kthvalue": lambda *_, **__: True,
    "aten::histc": lambda *_, **__: True,
    "aten::put_": lambda *_, **__: True,
}
"""Operations without a deterministic kernel on GPUs, and when: `torch.use_deterministic_algorithms`."""
_LISTS = ("aten::_foreach", "aten::_fused_adam")
_kernels: list[None] = []
"""An entry for each kernel that is computed at the moment."""
_pinned: dict[int, torch.Tensor | None] = {}
"""Pinned memory by its address; it is kept where it was made pinned, so that no other comes to lie there."""


class MixedDevices(RuntimeError):
    """An operation had tensors of the pretended GPU and of the CPU."""


class GpuTensor(torch.Tensor):
    """A tensor of the pretended GPU; `values` are its values on the CPU."""

    values: torch.Tensor

    @staticmethod
    def __new__(cls, values: torch.Tensor) -> GpuTensor:
        made: GpuTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            values.shape,
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
            device=_UNDERNEATH,
        )
        made.values = values
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return GPU

    is_cuda, is_cpu, is_meta = True, False, False  # type: ignore[assignment]

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        return self.detach()

    @data.setter
    def data(self, other: torch.Tensor) -> None:
        torch.Tensor.data.__set__(self, other)  # type: ignore[attr-defined]
        assert isinstance(other, GpuTensor)
        self.values = other.values

    def type(self, dtype: Any = None, **options: Any) -> Any:
        if dtype is not None:
            return super().type(dtype, **options)
        return self.values.type().replace("torch.", "torch.cuda.")

    def get_device(self) -> int:
        return 0

    def data_ptr(self) -> int:
        return self.values.data_ptr()

    def cpu(self, *_: object) -> torch.Tensor:
        return self.to("cpu")

    def cuda(self, *_: object, **__: object) -> torch.Tensor:
        return self

    def to(self, *args: Any, **options: Any) -> torch.Tensor:
        device, dtype, *_ = torch._C._nn._parse_to(*args, **{k: v for k, v in options.items() if k != "copy"})
        if (
            (device is None or device.type == "cuda")
            and dtype in (None, self.dtype)
            and not options.get("copy")
        ):
            return self
        return super().to(*args, **options)

    def record_stream(self, _: object) -> None:
        """Do nothing: memory of the pretended GPU is never used again while somebody holds it."""

    def tolist(self) -> Any:
        wait()
        return self.values.tolist()

    def numpy(self, *_: object, **__: object) -> Any:
        raise MixedDevices("numpy() of a tensor on the GPU")

    def __repr__(self, **_: object) -> str:
        return f"GpuTensor({self.values})"

    @classmethod
    def __torch_dispatch__(
        cls,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return _run(func, tuple(args), dict(kwargs or {}))


class PretendedGpu(TorchDispatchMode):
    """Within it tensors are made on the pretended GPU where `device` says so."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if DTensor in types:
            return NotImplemented  # its own operations come here then
        return _run(func, tuple(args), dict(kwargs or {}))


def to_gpu(values: torch.Tensor) -> GpuTensor:
    """Return a tensor of the pretended GPU with these values."""
    return GpuTensor(values)


@contextlib.contextmanager
def within_kernel() -> Iterator[None]:
    """Let nobody wait: what happens here stands for one kernel."""
    _kernels.append(None)
    yield
    _kernels.pop()


def wait() -> None:
    """Have the host wait for what the current stream was given."""
    if not _kernels:
        note_wait()
        STREAMS.wait(STREAMS.now(STREAMS.current))


def note_wait() -> None:
    """Count that the host waits for the device here, at the innermost line of our packages."""
    for frame in reversed(traceback.extract_stack()):
        if any(name in frame.filename for name in PACKAGES) and "/tests/" not in frame.filename:
            WAITS[f"{frame.filename.rpartition('/site-packages/')[2]}:{frame.lineno}"] += 1
            return
    WAITS["elsewhere"] += 1


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    name, wanted = func._schema.name, kwargs.get("device")
    leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    is_on_gpu = any(isinstance(leaf, GpuTensor) for leaf in leaves)
    to_gpu_is_asked = wanted is not None and torch.device(wanted).type in _NAMES
    if not (is_on_gpu or to_gpu_is_asked):
        return _run_on_cpu(func, args, kwargs)
    if name.startswith("c10d::"):
        return _communicate(func, leaves, args, kwargs)
    _check_devices(name, leaves, is_on_gpu)
    if is_on_gpu and torch.are_deterministic_algorithms_enabled():
        _check_repeats(name, args, kwargs)
    is_sent = name == "aten::_to_copy" and _is_sent(args[0], kwargs)
    if not is_sent:
        _count_wait(name, args, kwargs, to_gpu_is_asked)
    if wanted is not None:
        kwargs["device"] = torch.device("cpu")
    kwargs.pop("pin_memory", None)
    if name == "aten::copy_" and _is_under_way(args, kwargs):
        return _copy_later(args[0], args[1])
    if is_sent:
        return _copy_later(_make_target(args[0], kwargs, to_gpu_is_asked), args[0])
    found = _compute(func, tree_map(_values, args), tree_map(_values, kwargs))
    goes_to_cpu = name == "aten::_to_copy" and wanted is not None and not to_gpu_is_asked
    if name == "aten::_local_scalar_dense" or goes_to_cpu:
        return found
    if name == "aten::copy_" and not isinstance(args[0], GpuTensor):
        return args[0]  # the copy is made
    wrapped = tree_map(lambda one: GpuTensor(one) if type(one) is torch.Tensor else one, found)
    return return_and_correct_aliasing(func, args, kwargs, wrapped)


def _communicate(
    func: Any, leaves: Sequence[torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run a collective operation of gloo on the values, whose results are the tensors that were given."""
    given = {id(leaf.values): leaf for leaf in leaves if isinstance(leaf, GpuTensor)}
    _check_collective(func._schema.name, leaves)
    found = func(*tree_map(_values, args), **tree_map(_values, kwargs))
    return tree_map(lambda one: given.get(id(one), one), found)


def _check_collective(name: str, leaves: Sequence[torch.Tensor]) -> None:
    """Raise for tensors of the CPU, as NCCL does, which the backend stands for."""
    on_cpu = [tuple(leaf.shape) for leaf in leaves if not isinstance(leaf, GpuTensor)]
    if NCCL and on_cpu and name != "c10d::barrier":
        raise RuntimeError(f"No backend type associated with device type cpu: {name} of shapes {on_cpu}")


def _run_on_cpu(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    is_pinned = kwargs.pop("pin_memory", None) or func._schema.name == "aten::_pin_memory"
    if func._schema.name == "aten::is_pinned":
        return _is_pinned(args[0])
    if func._schema.name.startswith("c10d::"):
        _check_collective(
            func._schema.name, [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
        )
    for tensor in _written(func, args):
        STREAMS.check_write(tensor)
    found = args[0].clone() if func._schema.name == "aten::_pin_memory" else func(*args, **kwargs)
    if is_pinned:
        _pinned[found.untyped_storage().data_ptr()] = found
    return found


def _is_under_way(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    target, source, *others = args
    is_async = bool(kwargs.get("non_blocking") or any(others))
    hosts = [tensor for tensor in (target, source) if not isinstance(tensor, GpuTensor)]
    return is_async and len(hosts) == 1 and _is_pinned(hosts[0])


def _is_sent(source: torch.Tensor, kwargs: Mapping[str, Any]) -> bool:
    """Whether a copy goes to the other side and nobody waits: from pinned memory, or to some that it pins."""
    device = kwargs.get("device")
    if device is None or not kwargs.get("non_blocking"):
        return False
    is_on_gpu = isinstance(source, GpuTensor)
    is_kept = kwargs.get("dtype") in (None, source.dtype)
    return is_on_gpu != (device.type in _NAMES) and (is_on_gpu or (is_kept and _is_pinned(source)))


def _make_target(source: torch.Tensor, kwargs: Mapping[str, Any], is_to_gpu: bool) -> torch.Tensor:
    made = torch.empty_like(_values(source), dtype=kwargs.get("dtype"))
    if is_to_gpu:
        return GpuTensor(made)
    _pinned[made.untyped_storage().data_ptr()] = made
    return made


def _copy_later(target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    if isinstance(target, GpuTensor):
        STREAMS.copy_to_gpu(target.values, source)
    else:
        STREAMS.copy_to_host(target, _values(source))
    return target


def _written(func: Any, args: Sequence[Any]) -> list[torch.Tensor]:
    """Return the tensors that an operation writes into."""
    found = [one for wanted, one in zip(func._schema.arguments, args, strict=False) if wanted.is_write]
    leaves = [leaf for leaf in tree_leaves(found) if isinstance(leaf, torch.Tensor)]
    return [leaf for leaf in leaves if not isinstance(leaf, FakeTensor)]  # which has no memory


def _values(leaf: Any) -> Any:
    return leaf.values if isinstance(leaf, GpuTensor) else leaf


def pin(address: int) -> None:
    """Pin memory that is there already. CUDA refuses what is pinned."""
    assert address not in _pinned, "the memory is pinned already"
    _pinned[address] = None


def unpin(address: int) -> None:
    """Let go of memory that `pin` pinned."""
    assert _pinned.pop(address, 0) is None, "the memory is not pinned"


def _is_pinned(tensor: torch.Tensor) -> bool:
    return tensor.untyped_storage().data_ptr() in _pinned


def _check_devices(name: str, leaves: Sequence[torch.Tensor], is_on_gpu: bool) -> None:
    if not is_on_gpu or name in (*_COPYING, *_INDEXING):
        return
    takes_numbers = not name.startswith(_LISTS)  # as tensors of the CPU without a dimension
    on_cpu = [leaf for leaf in leaves if not isinstance(leaf, GpuTensor)]
    strangers = [tuple(leaf.shape) for leaf in on_cpu if leaf.dim() or not takes_numbers]
    if strangers:
        raise MixedDevices(f"{name} has tensors of the GPU and, of the CPU, those of shapes {strangers}")


def _check_repeats(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if _UNREPEATABLE.get(name, lambda *_, **__: False)(*args, **kwargs):
        raise RuntimeError(f"{name} does not have a deterministic implementation")
    if name in _PRODUCTS and os.environ.get("CUBLAS_WORKSPACE_CONFIG") not in (":4096:8", ":16:8"):
        raise RuntimeError("CuBLAS is not deterministic without CUBLAS_WORKSPACE_CONFIG")


def _count_wait(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], to_gpu_is_asked: bool) -> None:
    if name in _READS:
        wait()
    elif name in _INDEXING:
        indices = [leaf for leaf in tree_leaves(args[1]) if isinstance(leaf, torch.Tensor)]
        is_waited_for = [
            not isinstance(one, GpuTensor) or one.dtype in (torch.bool, torch.uint8) for one in indices
        ]
        if any(is_waited_for):
            wait()
    elif name == "aten::repeat_interleave" and kwargs.get("output_size") is None:
        wait()
    elif name in _COPYING:
        source, target = (args[1], args[0]) if name == "aten::copy_" else (args[0], None)
        is_within = isinstance(source, GpuTensor) and (
            isinstance(target, GpuTensor) if target is not None else to_gpu_is_asked or "device" not in kwargs
        )
        is_async = bool(kwargs.get("non_blocking") or (len(args) > 2 and args[2]))
        host = source if not isinstance(source, GpuTensor) else target
        has_pinned = host is not None and _is_pinned(host)
        if not is_within and not (is_async and has_pinned):
            wait()


def _compute(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation on the CPU; those that only GPUs have, by their formula."""
    formula = _OF_GPUS.get(str(func))
    return func(*args, **kwargs) if formula is None else formula(*args, **kwargs)


def _multiply(
    left: torch.Tensor, right: torch.Tensor, dtype: torch.dtype, **out: torch.Tensor
) -> torch.Tensor:
    return torch.mm(left.to(dtype), right.to(dtype), **out)


def _add_product(
    total: torch.Tensor, left: torch.Tensor, right: torch.Tensor, dtype: torch.dtype, *, out: torch.Tensor
) -> torch.Tensor:
    return torch.addmm(total, left.to(dtype), right.to(dtype), out=out)


def _normalise(
    x: torch.Tensor, _: object, weight: torch.Tensor, eps: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return x * scale * weight, scale


def _normalise_back(
    gradient: torch.Tensor, x: torch.Tensor, _: object, scale: torch.Tensor, weight: torch.Tensor, __: object
) -> tuple[torch.Tensor, torch.Tensor]:
    weighted = gradient * weight
    mean = (weighted * x).mean(-1, keepdim=True)
    return scale * (weighted - x * scale.square() * mean), (gradient * x * scale).flatten(0, -2).sum(0)


_OF_GPUS: dict[str, Callable[..., Any]] = {
    "aten._fused_rms_norm.default": _normalise,
    "aten._fused_rms_norm_backward.default": _normalise_back,
    "aten.addmm.dtype_out": _add_product,
    "aten.mm.dtype": _multiply,
    "aten.mm.dtype_out": _multiply,
}
