"""Streams of random numbers."""

import hashlib
import random

import numpy as np
import pytest
import torch

from task_images.harness import seeds
from task_images.harness.seeds import (
    derive,
    generator,
    lasting_generator,
    load_lasting_states,
    numpy_generator,
    read_lasting_states,
    seed_all,
    seed_device,
)


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


def test_torch_and_numpy_draw_from_the_same_kind_of_stream() -> None:
    seed = derive(42, "partition", 2)
    expected = np.random.Generator(np.random.PCG64(seed)).random(3)
    assert numpy_generator(42, "partition", 2).random(3).tolist() == expected.tolist()
    wanted = torch.rand(3, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(torch.rand(3, generator=generator(42, "partition", 2)), wanted)


def test_a_lasting_stream_goes_on_where_a_checkpoint_was_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seeds, "_lasting", {})
    stream = lasting_generator(1, "noise", 4)
    torch.rand(5, generator=stream)
    states = read_lasting_states()
    assert list(states) == ["noise/4"]
    expected = torch.rand(3, generator=stream)
    again = lasting_generator(1, "noise", 4)
    load_lasting_states({**states, "of another task": states["noise/4"]})
    assert torch.equal(torch.rand(3, generator=again), expected)
    assert list(read_lasting_states()) == ["noise/4"]


def draw() -> list[float]:
    return [random.random(), float(np.random.random()), torch.rand(1).item()]


def test_all_libraries_draw_the_same_everywhere_or_other_numbers_on_each_rank() -> None:
    drawn = []
    for rank in (None, None, 0, 1, 1):
        seed_all(42, rank)
        drawn.append(draw())
    assert drawn[0] == drawn[1]
    assert drawn[3] == drawn[4]
    for position in range(3):
        assert len({one[position] for one in drawn}) == 3
    seed_all(43)
    assert all(one != other for one, other in zip(draw(), drawn[0], strict=True))
