"""The published sizes of the ResNets, and that they work on more than one image size."""

import pytest
import torch

from task_images.resnet import resnet


@pytest.mark.parametrize(
    ("depth", "version", "parameters"),
    # Version 1 has the projection with BN, version 2 one in every first block without it, and one BN at the end.
    [(20, 1, 272_474), (32, 1, 466_906), (44, 1, 661_338), (56, 1, 855_770), (20, 2, 272_538)],
)
def test_number_of_parameters(depth: int, version: int, parameters: int) -> None:
    assert sum(item.numel() for item in resnet(depth, version).parameters()) == parameters


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("side", [8, 32])
def test_any_image_size_gives_ten_logits_and_gradients_everywhere(version: int, side: int) -> None:
    model = resnet(8, version)
    model(torch.randn(2, 3, side, side)).square().sum().backward()
    assert all(item.grad is not None and bool(item.grad.isfinite().all()) for item in model.parameters())
    assert model(torch.randn(2, 3, side, side)).shape == (2, 10)
