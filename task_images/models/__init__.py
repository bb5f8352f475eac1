"""The image models. What they share is here: normalization, and channels in multiples of eight."""

from collections.abc import Callable

from torch import nn

Norm = Callable[[int], nn.Module]

NORMS = ("batch", "group")
MOST_GROUPS = 32


def make_norm(kind: str) -> Norm:
    """A function from the number of channels to a normalization layer with scale and shift per channel.

    "batch": BatchNorm, with statistics of this rank's batch, so the same global batch on more ranks is a different
    training. "group": GroupNorm (Wu and He 2018), independent of the batch, with the same number of parameters. Raises
    ValueError for other values.
    """
    if kind not in NORMS:
        raise ValueError(f"the normalization {kind!r} is not one of {', '.join(NORMS)}")
    return nn.BatchNorm2d if kind == "batch" else _group_norm


def _group_norm(channels: int) -> nn.Module:
    """GroupNorm with as many equal groups as possible: at most 32, each with at least two channels."""
    fitting = (groups for groups in range(min(MOST_GROUPS, channels // 2), 0, -1) if channels % groups == 0)
    return nn.GroupNorm(next(fitting, 1), channels)


def widen(channels: int, width: float) -> int:
    """`channels` times `width`, to the nearest multiple of 8; at least 8."""
    return max(8, 8 * round(channels * width / 8))
