"""torch's implementations of attention: which are allowed, which is used, and what is refused; Muon by its formula."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from task_images.harness.errors import TaskUsageError
from task_images.harness.language import attention
from task_images.harness.language.attention import choose_attention, find_kernel
from task_images.harness.language.float8 import Float8Linear, require_float8, use_float8
from task_images.harness.language.muon import Muon, orthogonalize

CPU = torch.device("cpu")
KINDS = ("flash", "cudnn", "efficient", "math")
NAMES = {"flash": "flash_sdp", "cudnn": "cudnn_sdp", "efficient": "mem_efficient_sdp", "math": "math_sdp"}


@pytest.fixture(autouse=True)
def keep_choice() -> Iterator[None]:
    before = [getattr(torch.backends.cuda, f"{name}_enabled")() for name in NAMES.values()]
    yield
    for name, value in zip(NAMES.values(), before, strict=True):
        getattr(torch.backends.cuda, f"enable_{name}")(value)


def allowed() -> dict[str, bool]:
    return {kind: getattr(torch.backends.cuda, f"{name}_enabled")() for kind, name in NAMES.items()}


@pytest.mark.parametrize("name", ["auto", *KINDS])
def test_only_the_named_implementation_is_allowed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "find_kernel", lambda *_, **__: "the kernel")
    found = choose_attention(name, (1, 2, 8, 16), CPU, torch.float32)
    assert found == {"attention": name, "attention_kernel": "the kernel"}
    assert allowed() == {kind: name in ("auto", kind) for kind in KINDS}


def test_the_kernel_is_found_for_causal_attention_of_the_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_attention("math", (1, 2, 8, 16), CPU, torch.float32)["attention_kernel"] == "math"
    assert choose_attention("flash", (1, 2, 8, 16), CPU, torch.bfloat16)["attention_kernel"] == "flash"
    asked: list[Any] = []

    def find(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **more: Any) -> None:
        asked.append((query.shape, query.dtype, query.requires_grad, more))

    monkeypatch.setattr(attention, "find_kernel", find)
    with pytest.raises(TaskUsageError, match=r"called cudnn computes heads of 16 channels in torch\.float32") as caught:
        choose_attention("cudnn", (1, 2, 8, 16), CPU, torch.float32)
    assert caught.value.hint == "--set attention=auto"
    assert asked == [((1, 2, 8, 16), torch.float32, True, {"is_causal": True})]


def test_no_kernel_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> int:
        raise RuntimeError("no available kernel")

    one: Any = None
    monkeypatch.setattr(torch, "_fused_sdp_choice", fail)
    assert find_kernel(one, one, one, is_causal=True) is None
    monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *_, **__: 10**6)
    assert find_kernel(one, one, one, is_causal=True) is None


# --- 8 bits ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("inputs", "outputs", "is_changed"),
    [(16, 16, True), (32, 48, True), (15, 16, False), (16, 17, False), (8, 16, False)],
)
def test_layers_of_whole_tiles_compute_in_8_bits(inputs: int, outputs: int, is_changed: bool) -> None:
    layer, special = nn.Linear(inputs, outputs), nn.modules.linear.NonDynamicallyQuantizableLinear(16, 16)
    use_float8([layer, special])
    assert type(layer) is (Float8Linear if is_changed else nn.Linear)
    assert not isinstance(special, Float8Linear)


def test_8_bit_products_are_tried_with_a_square_of_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def multiply(left: torch.Tensor, right: torch.Tensor, **more: Any) -> None:
        seen.append((left.shape, left.dtype, right.shape, right.is_contiguous(), more["out_dtype"]))

    monkeypatch.setattr(torch, "_scaled_mm", multiply)
    require_float8(CPU)
    assert seen == [((16, 16), torch.float8_e4m3fn, (16, 16), False, torch.bfloat16)]


# --- Muon -----------------------------------------------------------------------------------------------------------


def test_an_update_is_the_published_formula() -> None:
    """Momentum as a mean, Nesterov's direction, decay before the step, and more for tall matrices."""
    torch.manual_seed(0)
    for shape, scale in (((16, 4), 2.0), ((4, 16), 1.0)):
        weight = nn.Parameter(torch.randn(shape))
        expected, momentum = weight.detach().clone(), torch.zeros(shape)
        groups: list[dict[str, Any]] = [{"params": [weight], "muon": True, "lr": 0.1, "weight_decay": 0.5}]
        optimizer = Muon(groups, momentum=0.8, iterations="exact")
        for _ in range(3):
            gradient = torch.randn(shape)
            weight.grad = gradient.clone()
            optimizer.step()
            momentum = 0.8 * momentum + 0.2 * gradient
            direction = 0.2 * gradient + 0.8 * momentum
            left, _, right = torch.linalg.svd(direction, full_matrices=False)
            expected = expected * (1 - 0.1 * 0.5) - 0.1 * scale * (left @ right)
        assert (weight - expected).norm() < 0.03 * expected.norm()
        assert int(optimizer.state[weight]["step"]) == 3


def test_a_matrix_without_a_gradient_stays_and_groups_are_kept() -> None:
    one, other = nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(4, 4))
    groups: list[dict[str, Any]] = [{"params": [one, other], "muon": True, "lr": 0.1}]
    optimizer = Muon(groups)
    one.grad = torch.eye(4)
    optimizer.step()
    assert other.tolist() == [[1.0] * 4] * 4
    assert not torch.equal(one, other)
    assert len(optimizer.param_groups) == 1
    assert optimizer.step(lambda: torch.tensor(3.0)) == 3.0


def test_a_rank_orthogonalizes_its_share_of_each_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three matrices on two ranks: two of rank 0, one and a filler of rank 1."""
    torch.manual_seed(0)
    matrices = [torch.randn(4, 4) for _ in range(3)] + [torch.randn(2, 4)]
    made: dict[int, list[torch.Tensor]] = {}

    def gather(every: torch.Tensor, own: torch.Tensor) -> None:
        made.setdefault(rank, []).append(own)
        every.copy_(torch.cat([own, own]))

    monkeypatch.setattr(torch.distributed, "all_gather_into_tensor", gather)
    for rank in (0, 1):
        weight = nn.Parameter(torch.ones(4, 4))
        groups: list[dict[str, Any]] = [{"params": [weight], "muon": True}]
        Muon(groups, lr=0.1, rank=rank, ranks=2)._orthogonalize_all(matrices)
    assert [part.shape for part in made[0]] == [(2, 4, 4), (1, 2, 4)]
    torch.testing.assert_close(made[0][0], orthogonalize(torch.stack(matrices[:2])))
    torch.testing.assert_close(made[1][0], orthogonalize(torch.stack([matrices[2], torch.zeros(4, 4)])))
    assert not made[1][1].any()  # the only matrix of its shape belongs to rank 0
