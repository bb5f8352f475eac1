"""Streams of random numbers."""

import hashlib

import pytest
import torch

from task_images.data import derive, seed_device


def test_a_pass_has_the_numbers_of_its_stream_whatever_was_drawn_before() -> None:
    """The same as torch.manual_seed would give."""
    torch.rand(7)
    seed_device(torch.device("cpu"), 42, "dropout", 3, 0)
    found = torch.nn.functional.dropout(torch.ones(64), 0.5)
    torch.manual_seed(derive(42, "dropout", 3, 0))
    assert torch.equal(found, torch.nn.functional.dropout(torch.ones(64), 0.5))
    seed_device(torch.device("cpu"), 42, "dropout", 3, 1)
    assert not torch.equal(found, torch.nn.functional.dropout(torch.ones(64), 0.5))


@pytest.mark.parametrize(
    ("path", "text"), [((42,), b"42"), ((42, "split"), b"42/split"), ((42, "crop", 3, 7), b"42/crop/3/7")]
)
def test_a_stream_is_named_by_its_path(path: tuple[int | str, ...], text: bytes) -> None:
    """The first 63 bits of BLAKE2b with a digest of 8 bytes."""
    whole = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")
    first, *rest = path
    assert derive(int(first), *rest) == whole // 2 < 2**63
