"""The digest that a GPU computes of a pack: any change is found, and a CPU comes to the same one."""

from __future__ import annotations

import pytest
import torch

from tests.pretended_gpu.device.tensors import to_gpu
from weight_sync.direct.transports.seals import DIGEST_BYTES, digest_on_device


def digest(data_B: torch.Tensor, seed: int = 7) -> bytes:
    found = digest_on_device(data_B, seed)
    assert found.shape == (DIGEST_BYTES,)
    return found.cpu().numpy().tobytes()


def random_bytes(size: int) -> torch.Tensor:
    return torch.randint(256, (size,), generator=torch.Generator().manual_seed(size)).to(torch.uint8)


@pytest.mark.parametrize("size", [1, 8, 29, 64])
def test_each_bit_that_changes_is_found(size: int) -> None:
    data_B, found = random_bytes(size), set()
    for bit in range(8 * size):
        changed_B = data_B.clone()
        changed_B[bit // 8] ^= 1 << bit % 8
        found.add(digest(changed_B))
    assert len(found | {digest(data_B)}) == 8 * size + 1


def test_what_a_sum_of_all_bytes_would_not_see_is_found() -> None:
    data_B = random_bytes(64)
    exchanged_B = torch.cat([data_B[8:16], data_B[:8], data_B[16:]])
    flipped_B = data_B.clone()
    flipped_B[7::8] ^= 128  # the highest bit of each number
    others = [exchanged_B, flipped_B, data_B[:60], torch.cat([data_B, torch.zeros(1, dtype=torch.uint8)])]
    assert len({digest(one) for one in (data_B, *others)}) == 5
    assert len({digest(data_B, seed) for seed in (0, 1, 1 << 32, (1 << 64) - 1)}) == 4
    assert digest(torch.zeros(12, dtype=torch.uint8)) != digest(torch.zeros(13, dtype=torch.uint8))


def test_both_sides_come_to_the_same_digest_wherever_the_bytes_lie(gpu: None) -> None:
    assert digest(to_gpu(random_bytes(29))) == digest(random_bytes(29))
