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
from typing import Any

import msgpack

from asyncrl.core.errors import SyncError, WireError
from asyncrl.core.staleness import PolicyVersion
from asyncrl.core.wire import field, unpack_map
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


@dataclass(frozen=True)
class TensorSpec:
    """Name, dtype (torch's name) and shape of a tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class TensorEntry:
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
        return bytes(msgpack.packb(_to_plain(self), use_bin_type=True))

    @staticmethod
    def from_bytes(
        data: bytes, like: Manifest | None = None, bounds: VersionBounds = ANY_VERSION
    ) -> Manifest:
        """Return the manifest in `data`; if its layout is that of `like`, that is not checked again.

        With 300 tensors the check is 2.2 of 2.8 ms, and the learner waits for the publisher's.

        Raises:
            WireError: The bytes are no manifest, or it contradicts itself, or is beyond `bounds`.
        """
        manifest = _from_plain(unpack_map(data, "manifest", bounds.manifest_bytes), like)
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

    def place(self, spec: TensorSpec) -> TensorEntry:
        """Give `spec` its place.

        Raises:
            SyncError: A name comes twice, or the dtype cannot be carried.
        """
        if spec.name in self._names:
            raise SyncError(f"the tensor '{spec.name}' comes twice in one version")
        if spec.dtype not in ITEM_BYTES:
            raise SyncError(f"the tensor '{spec.name}' has the dtype {spec.dtype}, which cannot be carried")
        entry = TensorEntry(spec.name, spec.dtype, tuple(spec.shape), self._end, spec.num_bytes)
        self._names.add(spec.name)
        self._entries.append(entry)
        self._end = align(entry.offset + entry.num_bytes)
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


def plan(specs: Iterable[TensorSpec], bucket_bytes: int) -> Layout:
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
    found = {entry.name: entry for entry in manifest.tensors}
    both = sorted(set(found) & set(expected))
    wrong = {
        "missing": sorted(set(expected) - set(found)),
        "unexpected": sorted(set(found) - set(expected)),
        "of another shape": [name for name in both if found[name].shape != tuple(expected[name])],
        "of another dtype": [name for name in both if dtypes and found[name].dtype not in dtypes[name]],
    }
    if any(wrong.values()):
        named = ", ".join(f"{what} {names[:5]}" for what, names in wrong.items() if names)
        raise SyncError(
            f"version {manifest.version.number} does not fit the engine: {named}",
            hint="Learner and engine must hold the same model",
        )


def _to_plain(manifest: Manifest) -> dict[str, object]:
    probe = manifest.probe
    return {
        "version": [manifest.version.number, manifest.version.step],
        "bucket_bytes": manifest.layout.bucket_bytes,
        "tensors": _rows(manifest.layout),
        "buckets": [[bucket.num_bytes, bucket.digest] for bucket in manifest.buckets],
        "probe": _plain_probe(probe) if probe else None,
    }


def _plain_probe(probe: Probe) -> dict[str, object]:
    lists = {"tokens": list(probe.tokens), "logprobs": list(probe.logprobs)}
    return {
        **lists,
        "row_tokens": probe.row_tokens,
        "temperature": probe.temperature,
        "every": probe.every,
    }


def _rows(layout: Layout) -> list[list[object]]:
    return [[t.name, t.dtype, list(t.shape), t.offset, t.num_bytes] for t in layout.tensors]


def _from_plain(plain: dict[str, object], like: Manifest | None) -> Manifest:
    number, step = _row(field(plain, "version", list), int, int)
    bucket_bytes = field(plain, "bucket_bytes", int)
    if number < 1 or step < 0 or bucket_bytes < 1:
        raise WireError(f"a manifest has version {number}, step {step}, buckets of {bucket_bytes} bytes")
    layout = _layout(field(plain, "tensors", list), bucket_bytes, like.layout if like else None)
    buckets = tuple(Bucket(*_row(row, int, str)) for row in field(plain, "buckets", list))
    _check_buckets(layout, buckets)
    probe = plain.get("probe")
    return Manifest(
        PolicyVersion(number, step), layout, buckets, _probe(probe) if probe is not None else None
    )


def _layout(rows: list[object], bucket_bytes: int, like: Layout | None) -> Layout:
    if like is not None and like.bucket_bytes == bucket_bytes and _rows(like) == rows:
        return like
    checked = [_row(row, str, str, list, int, int) for row in rows]
    entries = tuple(
        TensorEntry(name, dtype, _shape(name, shape), offset, size)
        for name, dtype, shape, offset, size in checked
    )
    return _checked_layout(entries, bucket_bytes)


def _row(row: object, *kinds: type) -> list[Any]:
    if not isinstance(row, list) or len(row) != len(kinds):
        raise WireError(f"a manifest has a row that is not {len(kinds)} long: {str(row)[:80]}")
    for value, kind in zip(row, kinds, strict=True):
        if not isinstance(value, kind) or isinstance(value, bool):
            raise WireError(f"a manifest has {str(value)[:40]!r} where it wants {kind.__name__}")
    return row


def _shape(name: str, sizes: list[object]) -> tuple[int, ...]:
    whole = [size for size in sizes if isinstance(size, int) and not isinstance(size, bool) and size >= 0]
    if len(whole) != len(sizes) or len(sizes) > MAX_DIMENSIONS:
        raise WireError(f"the tensor '{name}' has an impossible shape")
    return tuple(whole)


def _checked_layout(entries: tuple[TensorEntry, ...], bucket_bytes: int) -> Layout:
    for entry in entries:
        if entry.dtype not in ITEM_BYTES:
            raise WireError(f"the tensor '{entry.name}' has the unknown dtype {entry.dtype[:40]!r}")
    try:
        layout = plan((entry.spec for entry in entries), bucket_bytes)
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


def _probe(plain: object) -> Probe:
    if not isinstance(plain, dict):
        raise WireError("a manifest's probe must be a map")
    tokens, logprobs = field(plain, "tokens", list), field(plain, "logprobs", list)
    if not all(isinstance(token, int) for token in tokens) or not all(isinstance(x, float) for x in logprobs):
        raise WireError("a manifest's probe must hold whole tokens and real log-probs")
    temperature, row_tokens = plain.get("temperature", 1.0), field(plain, "row_tokens", int)
    if not isinstance(temperature, float) or not temperature > 0:
        raise WireError("a manifest's probe must hold a temperature")
    if (every := field(plain, "every", int)) < 1:
        raise WireError(f"a manifest's probe is checked every {every} steps")
    num_rows, rest = divmod(len(tokens), row_tokens) if row_tokens > 1 else (0, 0)
    if not num_rows or rest or len(logprobs) != num_rows * (row_tokens - 1):
        raise WireError(
            "a manifest's probe must hold rows of one length, and a log-prob for all tokens but one"
        )
    return Probe(tuple(tokens), tuple(logprobs), row_tokens, temperature, every)
