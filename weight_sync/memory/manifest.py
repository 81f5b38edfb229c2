"""The description of one version's weights as a single run of bytes (pure).

Owns the layout: tensors lie one after another, each at a multiple of 64 bytes, in one address space
of `total_bytes`. Buckets are slices of that space, all `bucket_bytes` long but the last, so a tensor
may span buckets and still lies in one piece in the file of a staged copy.
Invariant: the layout follows from the ordered (name, dtype, shape) and `bucket_bytes` alone; both
sides make the same cut.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache

import msgspec

from asyncrl.core.errors import SyncError, WireError
from asyncrl.core.staleness import PolicyVersion
from weight_sync.protocol.lanes.stripes import Stripe

ALIGNMENT_BYTES = 64
DIGEST_CHARS = 32
MAX_DIMENSIONS = 16
MAX_TOTAL_BYTES = 1 << 44
MAX_MANIFEST_BYTES = 16 << 20
"""Of a model whose size nobody told: 100,000 tensors. Empty maps take seventy times as much once read."""
ITEM_BYTES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int16": 2,
    "float16": 2,
    "bfloat16": 2,
    "int32": 4,
    "float32": 4,
    "int64": 8,
    "float64": 8,
}
"""Bytes per element, by torch's name of the dtype without `torch.`."""


class TensorSpec(msgspec.Struct, frozen=True, gc=False):
    """Name, dtype (torch's name) and shape of a tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


class TensorEntry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A tensor at bytes `offset <= i < offset + num_bytes` of the address space."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int

    @property
    def spec(self) -> TensorSpec:
        return TensorSpec(self.name, self.dtype, self.shape)


@dataclass(frozen=True)
class Bucket:
    """A slice of the address space and the xxh3-128 digest of its bytes, in hex."""

    num_bytes: int
    digest: str


@dataclass(frozen=True)
class Probe:
    """Rows of tokens and the learner's log-prob of each token after its row's first, at `temperature`.

    Shipped unchanged; an engine that loaded the version must agree before it serves it, if a check is due
    (`weight_sync.memory.agreement.is_check_due`).

    Attributes:
        tokens: Rows of `row_tokens` each, one after another.
        logprobs: `row_tokens` - 1 of each row.
        every: Steps between the checks of an engine that has passed the first ones.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    row_tokens: int
    temperature: float = 1.0
    every: int = 1

    @property
    def num_rows(self) -> int:
        return len(self.tokens) // self.row_tokens

    def rows(self) -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
        """Return tokens and log-probs of each row."""
        size = self.row_tokens
        return [
            (
                self.tokens[row * size : (row + 1) * size],
                self.logprobs[row * (size - 1) : (row + 1) * (size - 1)],
            )
            for row in range(self.num_rows)
        ]


@dataclass(frozen=True)
class Layout:
    """Layout of the tensors, without contents."""

    tensors: tuple[TensorEntry, ...]
    bucket_bytes: int
    total_bytes: int

    @cached_property
    def packed(self) -> bytes:
        """The tensors as msgpack."""
        return msgspec.msgpack.encode(self.tensors)

    @property
    def num_buckets(self) -> int:
        return -(-self.total_bytes // self.bucket_bytes)

    def span(self, stripe: Stripe) -> tuple[int, int]:
        """Return the first byte of a stripe and the one after its last."""
        buckets = stripe.buckets(self.num_buckets)
        return buckets.start * self.bucket_bytes, min(buckets.stop * self.bucket_bytes, self.total_bytes)

    def segment_bytes(self, stripe: Stripe) -> int:
        """Return the size of a segment for a stripe; an empty one has a byte, as nothing cannot be mapped."""
        start, end = self.span(stripe)
        return max(1, end - start)

    def pieces(self, entry: TensorEntry) -> list[tuple[int, int, int]]:
        """Return the pieces of a tensor as (bucket, start, end), in bytes of the address space."""
        end = entry.offset + entry.num_bytes
        first, last = entry.offset // self.bucket_bytes, (max(end, entry.offset + 1) - 1) // self.bucket_bytes
        return [
            (i, max(entry.offset, i * self.bucket_bytes), min(end, (i + 1) * self.bucket_bytes))
            for i in range(first, last + 1)
        ]


@dataclass(frozen=True)
class VersionBounds:
    """Largest size of one version.

    Attributes:
        total_bytes: Of its weights.
        manifest_bytes: Of their description.
    """

    total_bytes: int = MAX_TOTAL_BYTES
    manifest_bytes: int = MAX_MANIFEST_BYTES

    def check_size(self, num_bytes: int) -> None:
        """Raise WireError if no version has this size."""
        if not 0 <= num_bytes <= self.total_bytes:
            raise WireError(
                f"a version of {num_bytes} bytes is not one of this run's model, which takes up to "
                f"{self.total_bytes}"
            )


ANY_VERSION = VersionBounds()


@dataclass(frozen=True)
class Manifest:
    """A version's layout, its digests and its probe; what an offer carries."""

    version: PolicyVersion
    layout: Layout
    buckets: tuple[Bucket, ...]
    probe: Probe | None = None

    @property
    def tensors(self) -> tuple[TensorEntry, ...]:
        return self.layout.tensors

    @property
    def total_bytes(self) -> int:
        return self.layout.total_bytes

    @property
    def digests(self) -> tuple[str, ...]:
        """Digest of each bucket."""
        return tuple(bucket.digest for bucket in self.buckets)

    def bucket_range(self, index: int) -> tuple[int, int]:
        """Return the first byte of a bucket and the one after its last."""
        start = index * self.layout.bucket_bytes
        return start, start + self.buckets[index].num_bytes

    def to_bytes(self) -> bytes:
        """Return the manifest as msgpack."""
        return msgspec.msgpack.encode(_to_wire(self))

    @staticmethod
    def from_bytes(data: bytes, bounds: VersionBounds = ANY_VERSION) -> Manifest:
        """Return the manifest in `data`.

        Raises:
            WireError: The bytes are no manifest, or it contradicts itself, or is beyond `bounds`.
        """
        if len(data) > bounds.manifest_bytes:
            raise WireError(f"a manifest of {len(data)} bytes is over the limit of {bounds.manifest_bytes}")
        try:
            manifest = _from_wire(_WIRE.decode(data))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise WireError(f"these bytes are no manifest: {error}") from error
        bounds.check_size(manifest.total_bytes)
        return manifest


class Planner:
    """Places tensors one after another; `place` is called in the order of the address space.

    >>> planner = Planner()
    >>> [planner.place(TensorSpec(name, "float32", (3,))).offset for name in ("a", "b")]
    [0, 64]
    """

    def __init__(self) -> None:
        self._entries: list[TensorEntry] = []
        self._names: set[str] = set()
        self._end = 0

    def place(self, spec: TensorSpec | TensorEntry) -> TensorEntry:
        """Give `spec` its place.

        Raises:
            SyncError: A name comes twice, or the dtype cannot be carried.
        """
        if spec.name in self._names:
            raise SyncError(f"the tensor '{spec.name}' comes twice in one version")
        if spec.dtype not in ITEM_BYTES:
            raise SyncError(f"the tensor '{spec.name}' has the dtype {spec.dtype}, which cannot be carried")
        num_bytes = math.prod(spec.shape) * ITEM_BYTES[spec.dtype]
        entry = TensorEntry(spec.name, spec.dtype, tuple(spec.shape), self._end, num_bytes)
        self._names.add(spec.name)
        self._entries.append(entry)
        self._end = align(self._end + num_bytes)
        return entry

    def finish(self, bucket_bytes: int) -> Layout:
        """Return the layout of what was placed.

        Raises:
            SyncError: There is nothing to carry.
        """
        if self._end == 0:
            raise SyncError("a version without any bytes cannot be published")
        return Layout(tuple(self._entries), bucket_bytes, self._end)


def align(num_bytes: int) -> int:
    """Round up to the alignment."""
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def plan(specs: Iterable[TensorSpec | TensorEntry], bucket_bytes: int) -> Layout:
    """Return the layout of `specs` in their order."""
    planner = Planner()
    for spec in specs:
        planner.place(spec)
    return planner.finish(bucket_bytes)


def check_tensors(
    manifest: Manifest,
    expected: Mapping[str, tuple[int, ...]],
    dtypes: Mapping[str, Collection[str]] | None = None,
) -> None:
    """Compare the manifest's names, shapes and dtypes with what an engine expects.

    Args:
        expected: Shape of every tensor, by name.
        dtypes: The dtypes that a tensor may have, by name; None takes any.

    Raises:
        SyncError: A tensor is missing, unexpected, of another shape or dtype. Nothing may be loaded then:
            a layer that receives nothing silently keeps its old weights.
    """

    def fits(entry: TensorEntry) -> bool:
        return expected.get(entry.name) == entry.shape and (not dtypes or entry.dtype in dtypes[entry.name])

    if len(expected) == len(manifest.tensors) and all(map(fits, manifest.tensors)):
        return
    found = {entry.name: entry for entry in manifest.tensors}
    both = [found[name] for name in sorted(found.keys() & expected.keys())]
    wrong = {
        "missing": sorted(expected.keys() - found.keys()),
        "unexpected": sorted(found.keys() - expected.keys()),
        "of another shape": [entry.name for entry in both if entry.shape != tuple(expected[entry.name])],
        "of another dtype": [x.name for x in both if dtypes and x.dtype not in dtypes[x.name]],
    }
    named = ", ".join(f"{what} {names[:5]}" for what, names in wrong.items() if names)
    if named:
        raise SyncError(
            f"version {manifest.version.number} does not fit the engine: {named}",
            hint="Learner and engine must hold the same model",
        )


class _Wire(msgspec.Struct, frozen=True):
    """A manifest as it travels. The tensors stay bytes: of one run's versions all have the same."""

    version: tuple[int, int]
    bucket_bytes: int
    tensors: msgspec.Raw
    buckets: tuple[tuple[int, str], ...]
    probe: Probe | None


_WIRE, _TENSORS = msgspec.msgpack.Decoder(_Wire), msgspec.msgpack.Decoder(tuple[TensorEntry, ...])


def _to_wire(manifest: Manifest) -> _Wire:
    return _Wire(
        (manifest.version.number, manifest.version.step),
        manifest.layout.bucket_bytes,
        msgspec.Raw(manifest.layout.packed),
        tuple((bucket.num_bytes, bucket.digest) for bucket in manifest.buckets),
        manifest.probe,
    )


def _from_wire(wire: _Wire) -> Manifest:
    number, step = wire.version
    if number < 1 or step < 0 or wire.bucket_bytes < 1:
        raise WireError(f"a manifest has version {number}, step {step}, buckets of {wire.bucket_bytes} bytes")
    layout = _read_layout(bytes(wire.tensors), wire.bucket_bytes)
    buckets = tuple(Bucket(*row) for row in wire.buckets)
    _check_buckets(layout, buckets)
    if wire.probe is not None:
        _check_probe(wire.probe)
    return Manifest(PolicyVersion(number, step), layout, buckets, wire.probe)


@lru_cache(maxsize=2)
def _read_layout(packed: bytes, bucket_bytes: int) -> Layout:
    """Return the layout of the tensors, which is checked once for all versions of a run."""
    entries = _TENSORS.decode(packed)
    for shape in {entry.shape for entry in entries}:
        if len(shape) > MAX_DIMENSIONS or any(size < 0 for size in shape):
            raise WireError(f"a tensor has the impossible shape {str(shape)[:80]}")
    try:
        layout = plan(entries, bucket_bytes)
    except SyncError as error:
        raise WireError(error.message) from error
    if layout.tensors != entries or layout.total_bytes > MAX_TOTAL_BYTES:
        raise WireError("a manifest's offsets do not follow from its shapes")
    return layout


def _check_buckets(layout: Layout, buckets: tuple[Bucket, ...]) -> None:
    if len(buckets) != layout.num_buckets:
        raise WireError(f"a manifest has {len(buckets)} buckets, its tensors fill {layout.num_buckets}")
    for index, bucket in enumerate(buckets):
        wanted = min(layout.bucket_bytes, layout.total_bytes - index * layout.bucket_bytes)
        if bucket.num_bytes != wanted:
            raise WireError(f"bucket {index} has {bucket.num_bytes} bytes, wanted {wanted}")
        if len(bucket.digest) != DIGEST_CHARS:
            raise WireError(f"bucket {index} has a digest of {len(bucket.digest)} characters")


def _check_probe(probe: Probe) -> None:
    if not probe.temperature > 0:
        raise WireError("a manifest's probe must hold a temperature")
    if probe.every < 1:
        raise WireError(f"a manifest's probe is checked every {probe.every} steps")
    num_rows, rest = divmod(len(probe.tokens), probe.row_tokens) if probe.row_tokens > 1 else (0, 0)
    if not num_rows or rest or len(probe.logprobs) != num_rows * (probe.row_tokens - 1):
        raise WireError(
            "a manifest's probe must hold rows of one length, and a log-prob for all tokens but one"
        )
