"""Muon against torch's own, singular values against an SVD, work shared over ranks against one rank."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from task_images.language.muon import Muon, orthogonalize

SHAPES = [(8, 8), (24, 8), (8, 24), (8, 8)]


def make_parameters() -> list[nn.Parameter]:
    stream = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(shape, generator=stream)) for shape in SHAPES]


def gradients(step: int) -> list[Tensor]:
    stream = torch.Generator().manual_seed(100 + step)
    return [torch.randn(shape, generator=stream) for shape in SHAPES]


def test_it_moves_matrices_as_torchs_muon_does() -> None:
    own, theirs = make_parameters(), make_parameters()
    ours = Muon([{"params": own, "muon": True, "weight_decay": 0.1}], lr=0.02)
    torchs = torch.optim.Muon(theirs, lr=0.02, weight_decay=0.1, momentum=0.95, nesterov=True)
    for step in range(6):
        for members in (own, theirs):
            for member, gradient in zip(members, gradients(step), strict=True):
                member.grad = gradient.clone()
        ours.step()
        torchs.step()  # type: ignore[no-untyped-call]
    for mine, other, start in zip(own, theirs, make_parameters(), strict=True):
        # Both compute in bf16, here several matrices at a time.
        assert (mine - other).norm() < 0.04 * (mine - start).norm()


def test_other_groups_are_moved_by_adamw() -> None:
    own, theirs = make_parameters(), make_parameters()
    options: Any = {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-10}
    ours = Muon([{"params": own[:2], "muon": True}, {"params": own[2:], "weight_decay": 0.1}], **options)
    adamw = torch.optim.AdamW(theirs[2:], weight_decay=0.1, **options)
    for step in range(4):
        for members in (own, theirs):
            for member, gradient in zip(members, gradients(step), strict=True):
                member.grad = gradient.clone()
        ours.step()
        adamw.step()
    for mine, other in zip(own[2:], theirs[2:], strict=True):
        torch.testing.assert_close(mine, other)


@pytest.mark.parametrize(("iterations", "low", "high"), [("exact", 0.97, 1.03), ("fast", 0.6, 1.3)])
@pytest.mark.parametrize("shape", [(32, 32), (16, 48), (48, 16)])
def test_singular_values_come_near_one_and_vectors_stay(
    iterations: str, low: float, high: float, shape: tuple[int, int]
) -> None:
    left, _ = torch.linalg.qr(torch.randn(shape[0], shape[0], generator=torch.Generator().manual_seed(1)))
    right, _ = torch.linalg.qr(torch.randn(shape[1], shape[1], generator=torch.Generator().manual_seed(2)))
    rank = min(shape)
    values = torch.linspace(0.2, 1.0, rank)
    matrix = left[:, :rank] @ torch.diag(values) @ right[:, :rank].t()
    found = orthogonalize(matrix, iterations).float()
    made = torch.linalg.svdvals(found)
    assert low < made.min()
    assert made.max() < high
    polar = left[:, :rank] @ right[:, :rank].t()
    assert torch.nn.functional.cosine_similarity(found.flatten(), polar.flatten(), dim=0) > 0.97


def test_matrices_of_zeros_stay_zeros() -> None:
    assert not orthogonalize(torch.zeros(3, 4, 5)).any()


def test_parts_of_a_fused_matrix_are_moved_each_for_itself() -> None:
    """As three matrices of their own."""
    whole = nn.Parameter(torch.randn(24, 8, generator=torch.Generator().manual_seed(1)))
    parts = [nn.Parameter(part.clone()) for part in torch.split(whole.detach(), 8)]
    splits = {whole: (lambda matrix: list(torch.split(matrix, 8)), lambda *made: torch.cat(made))}
    one = Muon([{"params": [whole], "muon": True, "weight_decay": 0.0}], lr=0.1, splits=splits)
    three = Muon([{"params": parts, "muon": True, "weight_decay": 0.0}], lr=0.1)
    gradient = torch.randn(24, 8, generator=torch.Generator().manual_seed(2))
    whole.grad = gradient.clone()
    for part, of_part in zip(parts, torch.split(gradient, 8), strict=True):
        part.grad = of_part.clone()
    one.step()
    three.step()
    torch.testing.assert_close(whole.detach(), torch.cat([part.detach() for part in parts]))


def test_its_state_is_saved_and_loaded() -> None:
    own, other = make_parameters(), make_parameters()
    first = Muon([{"params": own[:2], "muon": True}, {"params": own[2:]}], lr=0.01)
    for member, gradient in zip(own, gradients(0), strict=True):
        member.grad = gradient
    first.step()
    second = Muon([{"params": other[:2], "muon": True}, {"params": other[2:]}], lr=0.01)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    with torch.no_grad():
        for mine, yours in zip(own, other, strict=True):
            yours.copy_(mine)
    for optimizer, members in ((first, own), (second, other)):
        for member, gradient in zip(members, gradients(1), strict=True):
            member.grad = gradient
        optimizer.step()
    assert all(torch.equal(mine, yours) for mine, yours in zip(own, other, strict=True))
