"""Parameters at their limits, optional entries of a task, and the rules that a run keeps of its task."""

import re
from typing import Any

import pytest

from mlbench_cli.errors import UsageError
from mlbench_cli.tasks.catalog import (
    Parameter,
    find_rules,
    rename_parameters,
)


@pytest.mark.parametrize(
    ("value", "message", "hint"),
    [
        ("0.9", "\"x\" is '0.9', the least is 1.", "--set x=1"),
        (3.6, '"x" is 3.6, the most is 3.5.', "--set x=3.5"),
        ("y", "is 'y', which is not of type float", None),
    ],
)
def test_a_value_out_of_range_comes_with_the_limit(value: Any, message: str, hint: str | None) -> None:
    with pytest.raises(UsageError, match=re.escape(message)) as caught:
        Parameter("x", "float", "help", 1.0, 3.5).check(value)
    assert caught.value.hint == hint


@pytest.mark.parametrize(
    ("value", "sizes"),
    [
        ("8B,1KiB", [8, 1024]),
        (["1KiB", "2KiB"], [1024, 2048]),
        ([1024], [1024]),
        ("1KiB:4KiB:x2", [1024, 2048, 4096]),
        ("8 parsecs", None),
        (1024, None),
    ],
)
def test_sizes_are_bytes(value: Any, sizes: list[int] | None) -> None:
    parameter = Parameter("x", "sizes", "help")
    if sizes is not None:
        assert parameter.check(value) == sizes
        return
    with pytest.raises(UsageError, match='The parameter "x"'):
        parameter.check(value)


# --- optional keys ----------------------------------------------------------------------------------------------------


# --- rules of a run ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["no_such_task", "../mnist", "", "mnist/../mnist", "comm"])
def test_what_is_no_task_has_no_rules(name: str) -> None:
    assert find_rules(name, "spec") is None
    assert rename_parameters(name, {"rate": 1}) == {"rate": 1}
