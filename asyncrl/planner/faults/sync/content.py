"""Weights as bytes: every bucket says whose weights it is, and which one (pure).

Two nodes never have a bucket alike, so a mix or an old bucket in a copy is seen in its bytes.
"""

from __future__ import annotations

import xxhash

from asyncrl.core.staleness import PolicyVersion
from weight_sync.memory.manifest import Bucket, Manifest, TensorSpec, plan

BUCKET_BYTES, NUM_BUCKETS = 64, 3
TOTAL_BYTES = BUCKET_BYTES * NUM_BUCKETS
LAYOUT = plan([TensorSpec("w", "uint8", (TOTAL_BYTES,))], BUCKET_BYTES)
BROKEN = -1


def bucket_of(node: int, index: int) -> bytes:
    """Return the bytes of a bucket."""
    return (node * NUM_BUCKETS + index).to_bytes(8, "little") * (BUCKET_BYTES // 8)


def manifest_of(number: int, step: int, node: int) -> Manifest:
    """Return what a learner publishes."""
    digests = (xxhash.xxh3_128_hexdigest(bucket_of(node, index)) for index in range(NUM_BUCKETS))
    buckets = tuple(Bucket(BUCKET_BYTES, digest) for digest in digests)
    return Manifest(PolicyVersion(number, step), LAYOUT, buckets)


def nodes_in(data: bytes) -> list[int]:
    """Return whose weights each bucket is; `BROKEN` for bytes that nobody wrote."""
    return [_node_in(data[at * BUCKET_BYTES : (at + 1) * BUCKET_BYTES], at) for at in range(NUM_BUCKETS)]


def _node_in(bucket: bytes, index: int) -> int:
    node = int.from_bytes(bucket[:8], "little") // NUM_BUCKETS
    return node if bucket == bucket_of(node, index) else BROKEN


def is_right(manifest: Manifest, index: int, bucket: bytes) -> bool:
    """Tell whether a bucket has the digest that the learner wrote down."""
    return bool(xxhash.xxh3_128_hexdigest(bucket) == manifest.buckets[index].digest)
