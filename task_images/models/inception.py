"""Inception-v3 (Szegedy et al. 2015, "Rethinking the Inception architecture") and v4 (Szegedy et al. 2016).

Without v3's auxiliary classifier. Each convolution is followed by normalization and ReLU. A block has parallel chains
of layers, whose outputs are concatenated.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from task_images.models.resnet import Norm, make_norm, widen

INCEPTIONS = (3, 4)
LEAST_SIDE = 75  # pixels; smaller images would shrink to nothing
DROPOUT = {3: 0.5, 4: 0.2}

Kernel = int | tuple[int, int]
Make = Callable[..., nn.Module]  # (inputs, outputs, kernel, stride, padding) -> convolution, normalization and ReLU


def inception(version: int, classes: int, width: float = 1.0, norm: str = "batch") -> nn.Module:
    """The Inception network of this version. Input of any size from 75x75, designed for 299x299."""
    make = partial(_convolution, make_norm(norm), width)
    body, channels = (_version_3 if version == 3 else _version_4)(make)
    return nn.Sequential(
        body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(DROPOUT[version]),
        nn.Linear(sum(widen(part, width) for part in channels), classes),
    )  # fmt: skip


class _Beside(nn.Module):
    """Parallel chains of layers, whose outputs are concatenated."""

    def __init__(self, *chains: nn.Module) -> None:
        super().__init__()
        self.chains = nn.ModuleList(chains)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([chain(x) for chain in self.chains], 1)


def _convolution(
    norm: Norm, width: float, inputs: int | Sequence[int], outputs: int, kernel: Kernel = 1, stride: int = 1,
    padding: Kernel = 0,
) -> nn.Module:  # fmt: skip
    parts = [inputs] if isinstance(inputs, int) else inputs
    channels = sum(part if part == 3 else widen(part, width) for part in parts)
    layer = nn.Conv2d(channels, widen(outputs, width), kernel, stride, padding, bias=False)
    nn.init.kaiming_normal_(layer.weight)
    return nn.Sequential(layer, norm(widen(outputs, width)), nn.ReLU(True))


def _chain(make: Make, inputs: int | Sequence[int], *layers: tuple[int, Kernel]) -> nn.Sequential:
    """Convolutions with stride 1 that keep the image's size, given as (outputs, kernel)."""
    found: list[nn.Module] = []
    for outputs, kernel in layers:
        sizes = (kernel, kernel) if isinstance(kernel, int) else kernel
        found.append(make(inputs, outputs, kernel, 1, (sizes[0] // 2, sizes[1] // 2)))
        inputs = outputs
    return nn.Sequential(*found)


def _pool_chain(make: Make, inputs: Sequence[int], outputs: int, padding_counts: bool) -> nn.Sequential:
    pool = nn.AvgPool2d(3, stride=1, padding=1, count_include_pad=padding_counts)
    return nn.Sequential(pool, make(inputs, outputs))


def _halving_chain(make: Make, chain: nn.Sequential, inputs: int, outputs: int) -> nn.Sequential:
    """A chain followed by a 3x3 convolution with stride 2."""
    return nn.Sequential(*chain, make(inputs, outputs, 3, 2))


def _fork(make: Make, chain: nn.Sequential, inputs: int, outputs: int) -> nn.Sequential:
    """A chain that ends in two branches, 1x3 and 3x1."""
    ways = [_chain(make, inputs, (outputs, kernel)) for kernel in ((1, 3), (3, 1))]
    return nn.Sequential(*chain, _Beside(*ways))


def _version_3(make: Make) -> tuple[nn.Sequential, tuple[int, ...]]:
    layers: list[nn.Module] = [
        make(3, 32, 3, 2), make(32, 32, 3), make(32, 64, 3, 1, 1), nn.MaxPool2d(3, 2),
        make(64, 80), make(80, 192, 3), nn.MaxPool2d(3, 2),
    ]  # fmt: skip
    x: tuple[int, ...] = (192,)
    for pooled in (32, 64, 64):
        layers.append(
            _Beside(
                _chain(make, x, (64, 1)),
                _chain(make, x, (48, 1), (64, 5)),
                _chain(make, x, (64, 1), (96, 3), (96, 3)),
                _pool_chain(make, x, pooled, True),
            )
        )
        x = (64, 64, 96, pooled)
    layers.append(
        _Beside(make(x, 384, 3, 2), _halving_chain(make, _chain(make, x, (64, 1), (96, 3)), 96, 96), nn.MaxPool2d(3, 2))
    )
    x = (384, 96, *x)
    for inner in (128, 160, 160, 192):
        layers.append(
            _Beside(
                _chain(make, x, (192, 1)),
                _chain(make, x, (inner, 1), (inner, (1, 7)), (192, (7, 1))),
                _chain(make, x, (inner, 1), (inner, (7, 1)), (inner, (1, 7)), (inner, (7, 1)), (192, (1, 7))),
                _pool_chain(make, x, 192, True),
            )
        )
        x = (192, 192, 192, 192)
    layers.append(
        _Beside(
            _halving_chain(make, _chain(make, x, (192, 1)), 192, 320),
            _halving_chain(make, _chain(make, x, (192, 1), (192, (1, 7)), (192, (7, 1))), 192, 192),
            nn.MaxPool2d(3, 2),
        )
    )
    x = (320, 192, *x)
    for _ in range(2):
        layers.append(
            _Beside(
                _chain(make, x, (320, 1)),
                _fork(make, _chain(make, x, (384, 1)), 384, 384),
                _fork(make, _chain(make, x, (448, 1), (384, 3)), 384, 384),
                _pool_chain(make, x, 192, True),
            )
        )
        x = (320, 384, 384, 384, 384, 192)
    return nn.Sequential(*layers), x


def _version_4(make: Make) -> tuple[nn.Sequential, tuple[int, ...]]:
    crossed = _chain(make, (64, 96), (64, 1), (64, (1, 7)), (64, (7, 1)))
    layers: list[nn.Module] = [
        make(3, 32, 3, 2), make(32, 32, 3), make(32, 64, 3, 1, 1),
        _Beside(nn.MaxPool2d(3, 2), make(64, 96, 3, 2)),
        _Beside(
            nn.Sequential(make((64, 96), 64), make(64, 96, 3)),
            nn.Sequential(*crossed, make(64, 96, 3)),
        ),
        _Beside(make((96, 96), 192, 3, 2), nn.MaxPool2d(3, 2)),
    ]  # fmt: skip
    x: tuple[int, ...] = (192, 96, 96)
    for _ in range(4):
        layers.append(
            _Beside(
                _chain(make, x, (96, 1)),
                _chain(make, x, (64, 1), (96, 3)),
                _chain(make, x, (64, 1), (96, 3), (96, 3)),
                _pool_chain(make, x, 96, False),
            )
        )
        x = (96, 96, 96, 96)
    layers.append(
        _Beside(
            make(x, 384, 3, 2), _halving_chain(make, _chain(make, x, (192, 1), (224, 3)), 224, 256), nn.MaxPool2d(3, 2)
        )
    )
    x = (384, 256, *x)
    for _ in range(7):
        layers.append(
            _Beside(
                _chain(make, x, (384, 1)),
                _chain(make, x, (192, 1), (224, (1, 7)), (256, (7, 1))),
                _chain(make, x, (192, 1), (192, (7, 1)), (224, (1, 7)), (224, (7, 1)), (256, (1, 7))),
                _pool_chain(make, x, 128, False),
            )
        )
        x = (384, 256, 256, 128)
    layers.append(
        _Beside(
            _halving_chain(make, _chain(make, x, (192, 1)), 192, 192),
            _halving_chain(make, _chain(make, x, (256, 1), (256, (1, 7)), (320, (7, 1))), 320, 320),
            nn.MaxPool2d(3, 2),
        )
    )
    x = (192, 320, *x)
    for _ in range(3):
        layers.append(
            _Beside(
                _chain(make, x, (256, 1)),
                _fork(make, _chain(make, x, (384, 1)), 384, 256),
                _fork(make, _chain(make, x, (384, 1), (448, (3, 1)), (512, (1, 3))), 512, 256),
                _pool_chain(make, x, 256, False),
            )
        )
        x = (256, 256, 256, 256, 256, 256)
    return nn.Sequential(*layers), x
