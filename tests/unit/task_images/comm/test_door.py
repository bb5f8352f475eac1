"""Methods that come through the door: the one of the how-to, mlbench's own, and files that are none."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from task_images.comm.choose import make_strategy
from task_images.comm.door import REGISTERED, load_file, read_options
from task_images.comm.methods import Method, MethodError, check
from task_images.comm.presets import PRESETS, find_registered, register, resolve
from task_images.comm.selfcheck import check_method
from tests.documentation import ROOT, read_blocks
from tests.unit.task_images.comm import references as papers
from tests.unit.task_images.comm.equality import (
    SETTINGS,
    Probe,
    draw_gradients,
    draw_weights,
    find_error,
    list_rates,
    train,
)
from tests.unit.task_images.comm.threads import ThreadWorld, run_ranks


@pytest.fixture
def example(tmp_path: Path) -> Iterator[Path]:
    """The file of the how-to; what it registers is forgotten afterwards."""
    [block] = [block for block in read_blocks(ROOT / "docs" / "how-to" / "write-a-method.md") if block.title]
    path = tmp_path / "averages.py"
    path.write_text(block.text)
    yield path
    PRESETS.pop("averages", None)
    REGISTERED.pop("averages", None)


def test_the_method_of_the_how_to_trains_as_it_says_and_passes_the_self_check(example: Path) -> None:
    register(load_file(str(example)), str(example))
    method = resolve("averages", {"steps": "2"})
    check(method, 3)
    assert Method.from_dict(method.to_dict()) == method
    reference = papers.Local(papers.average(2))
    for name in ("momentum", "AdamW", "clip", "fp16"):
        setting = SETTINGS[name]
        gradients = partial(draw_gradients, size=3, overflows=name == "fp16")
        found = [weights for weights, _ in run_ranks(3, partial(train, method=method, name=name))]
        expected = reference.run(setting, draw_weights(), gradients, list_rates(setting))
        assert find_error(found, expected) < 1e-9, name
    run_ranks(3, lambda world: check_method(world, method))


def test_a_rank_finds_the_file_that_the_tool_has_named(example: Path) -> None:
    document = {"name": "averages", "engine": "registered", "options": "steps=3", "file": str(example)}
    assert find_registered(Method.from_dict(document)).name == "averages"
    REGISTERED.pop("averages")
    PRESETS.pop("averages")
    with pytest.raises(MethodError, match="not installed"):
        find_registered(Method.from_dict({**document, "file": "none"}))


def test_the_bytes_of_its_rounds_are_those_that_it_sends() -> None:
    """What predictions count, against what the link has sent."""
    for name, changes in (("slowmo", {}), ("diloco", {"steps": "3"})):
        method = resolve(name, changes)
        handed = run_ranks(2, partial(count_bytes, method=method))[0]
        count = sum(part.size for part in draw_weights())
        rounds = find_registered(method).rounds(count, read_options(method.options))
        # The parameters of this test have 8 bytes.
        assert handed == sum(2 * each.size * len(list_rates(SETTINGS["AdamW"])) / each.every for each in rounds), name


def test_one_bit_adam_sends_the_bytes_of_its_rounds_and_a_scale_for_each_tensor() -> None:
    method = resolve("onebit-adam", {"warmup_steps": "2"})
    parts, updates = draw_weights(), len(list_rates(SETTINGS["AdamW"]))
    count = sum(part.size for part in parts)
    (each,) = find_registered(method).rounds(count, read_options(method.options))
    warm = 2 * 8 * count  # bytes of gradients, which travel whole
    handed = run_ranks(2, partial(count_bytes, method=method))[0]
    assert (handed - warm) / (updates - 2) == pytest.approx(each.size + 4 * len(parts), abs=1)


def count_bytes(world: ThreadWorld, method: Method) -> float:
    strategy = make_strategy(method)
    train(world, method, "AdamW", lambda _: strategy)
    return strategy.stats()["bytes"]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("x = 1", "0 subclasses"),
        ("def", "SyntaxError"),
        ("raise OSError('gone')", "gone"),
    ],
)
def test_files_without_a_method_are_refused_with_the_reason(text: str, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "wrong.py"
    path.write_text(text)
    with pytest.raises(MethodError, match=problem):
        load_file(str(path))
    with pytest.raises(MethodError, match="not a Python file"):
        load_file(str(tmp_path / "missing.py"))


def test_names_and_numbers_that_cannot_be_are_refused(example: Path) -> None:
    method = load_file(str(example))
    type(method).name = "bsp"
    with pytest.raises(MethodError, match="already"):
        register(method)
    with pytest.raises(MethodError, match=r"comm\.beta is '2', not a number from 0 to"):
        resolve("slowmo", {"beta": "2"})
    with pytest.raises(MethodError, match="no axis"):
        resolve("slowmo", {"gamma": "2"})


def test_probes_are_the_parameters_of_the_reference() -> None:
    assert [tuple(item.shape) for item in Probe().parameters()][::-1] == [part.shape for part in draw_weights()]
