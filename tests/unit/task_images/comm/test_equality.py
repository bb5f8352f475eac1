"""Every method equals its paper's pseudo-code, with every way to update that tasks have, or says why it does not."""

import re
from functools import partial
from typing import Any

import pytest

from task_images.comm.base import Strategy
from task_images.comm.choose import make_strategy
from task_images.comm.methods import NATIVE, Method
from task_images.comm.presets import PRESETS, resolve
from tests.documentation import ROOT
from tests.unit.task_images.comm.equality import (
    DIFFERENCES,
    SETTINGS,
    SIZES,
    UNCOMMON,
    Cell,
    judge,
    list_methods,
    read_page,
    train,
)
from tests.unit.task_images.comm.threads import ThreadWorld, run_ranks

OWN = [method for method in list_methods() if method.engine not in NATIVE]


def cell_at(text: str, size: int) -> str:
    """What a cell of the page, such as "equal (2, 4), refused (3)", says of a number of ranks."""
    return next(part.partition(" (")[0] for part in text.split("), ") if str(size) in part)


# What momentum and decay change is in these, too.
FEW = ("AdamW", "clip", "fp16")


@pytest.mark.parametrize("method", OWN, ids=lambda method: method.name)
@pytest.mark.parametrize(
    ("names", "sizes"),
    [
        pytest.param(FEW, (3,), id="sample"),
        pytest.param(tuple(SETTINGS), SIZES, id="all", marks=pytest.mark.nightly),
    ],
)
def test_every_method_equals_its_reference_or_is_refused(
    method: Method, names: tuple[str, ...], sizes: tuple[int, ...]
) -> None:
    verdicts = {(name, size): judge(method, name, size) for name in names for size in sizes}
    different = {case: verdict.why for case, verdict in verdicts.items() if verdict.cell is Cell.different}
    assert not different
    refused = {name for (name, _), verdict in verdicts.items() if verdict.cell is Cell.refused}
    others = {"dgc": {"AdamW"}, "onebit-adam": set(SETTINGS) - {"AdamW"}}
    expected = {"clip", "fp16"} if method.barrier == "none" else others.get(method.name, set())
    assert refused == expected & set(names)
    page = read_page()[method.name]
    wrong = {case for case, verdict in verdicts.items() if cell_at(page[case[0]], case[1]) != verdict.cell.value}
    assert not wrong, "python -m benchmarks.equality --write"


def test_the_page_has_every_method_and_every_difference() -> None:
    """benchmarks/equality.py writes it; the test above and that of torch's engines (contract) compare each cell."""
    page = read_page()
    assert list(page) == list(PRESETS)
    for cells in page.values():
        assert all(sorted(re.findall(r"\d", cell)) == ["2", "3", "4"] for cell in cells.values())
        assert not any(Cell.different.value in cell for cell in cells.values())
    text = (ROOT / "docs" / "explanation" / "methods-equality.md").read_text("utf-8")
    for name, difference in DIFFERENCES.items():
        assert f"- `{name}`: {difference}" in text


@pytest.mark.parametrize("name", ["eftopk", "ef-signsgd", "powersgd", "gtopk", "dgc", "signsgd-mv", "qsgd", "randomk"])
def test_every_codec_skips_the_updates_that_the_mean_skips(name: str) -> None:
    """Rank 1 has one entry that overflows in update 5, and rank 0 a whole tensor in update 8."""
    for _, made in run_ranks(3, partial(train, method=resolve(name), name="fp16")):
        assert [update for update, done in enumerate(made, 1) if not done] == [5, 8]


@pytest.mark.parametrize("method", [one for one in list_methods() if one.name in UNCOMMON], ids=lambda one: one.name)
def test_ranks_that_train_alone_wait_for_nobody_because_of_clipping(method: Method) -> None:
    """Nor because of a loss scale: there are as many collectives and messages as without."""
    plain = run_ranks(2, partial(count, method=method, setting="momentum"), method)
    for setting in ("clip", "fp16"):
        assert run_ranks(2, partial(count, method=method, setting=setting), method) == plain, setting


def count(world: ThreadWorld, method: Method, setting: str) -> tuple[int, float]:
    """Collectives of the training threads (on rank 0) and this rank's messages, after the strategy was attached."""
    found: list[tuple[int, float]] = []

    def make(method: Method) -> Strategy:
        strategy = make_strategy(method)
        attach, close = strategy.attach, strategy.close

        def note() -> None:
            world.barrier()
            found.append((world.shared.collectives if world.is_first else 0, strategy.stats()["messages"]))
            world.barrier()

        def attach_counting(*values: Any, **more: Any) -> Any:
            module = attach(*values, **more)
            note()
            return module

        def close_counting() -> None:
            note()
            close()

        strategy.attach, strategy.close = attach_counting, close_counting  # type: ignore[method-assign]
        return strategy

    train(world, method, setting, make)
    return found[1][0] - found[0][0], found[1][1] - found[0][1]
