"""The Pareto front of two costs."""

from collections.abc import Callable, Iterable
from typing import TypeVar

Item = TypeVar("Item")


def find_front(items: Iterable[Item], costs: Callable[[Item], tuple[float, float]]) -> list[Item]:
    """The items that no other item dominates (at least as good in both costs), by ascending first cost."""
    front: list[Item] = []
    least = float("inf")
    for item in sorted(items, key=costs):
        if not front or costs(item)[1] < least:
            front.append(item)
            least = costs(item)[1]
    return front
