"""Streams of random numbers."""

import torch

from task_images.harness.seeds import derive, seed_device


def test_a_pass_has_the_numbers_of_its_stream_whatever_was_drawn_before() -> None:
    """The same as torch.manual_seed would give."""
    torch.rand(7)
    seed_device(torch.device("cpu"), 42, "dropout", 3, 0)
    found = torch.nn.functional.dropout(torch.ones(64), 0.5)
    torch.manual_seed(derive(42, "dropout", 3, 0))
    assert torch.equal(found, torch.nn.functional.dropout(torch.ones(64), 0.5))
    seed_device(torch.device("cpu"), 42, "dropout", 3, 1)
    assert not torch.equal(found, torch.nn.functional.dropout(torch.ones(64), 0.5))
