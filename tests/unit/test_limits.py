"""Tests whose limit is less than five times what they took are named at the end, and nothing fails for it."""

from typing import Literal

import pytest

from tests.limits import limit_of, list_narrow_limits


def report(
    name: str, seconds: float, limit: float | None, when: Literal["setup", "call"] = "call"
) -> pytest.TestReport:
    location, properties = (name, 1, name), [] if limit is None else [("limit", limit)]
    return pytest.TestReport(name, location, {}, "passed", None, when, duration=seconds, user_properties=properties)


def test_the_narrowest_comes_first_and_what_has_room_is_left_out() -> None:
    found = [
        *(report("wide", 19.9, 100.0), report("narrow", 25.0, 100.0), report("narrowest", 90.0, 100.0)),
        *(report("unlimited", 900.0, 0.0), report("unknown", 900.0, None), report("fixture", 90.0, 100.0, "setup")),
    ]
    assert list_narrow_limits(found) == ["narrowest: 90 s of 100 s", "narrow: 25 s of 100 s"]


def test_a_test_without_a_limit_of_its_own_has_that_of_all(request: pytest.FixtureRequest) -> None:
    assert limit_of(request.node) == float(request.config.getini("timeout")) == 300.0
    assert ("limit", 300.0) in request.node.user_properties


@pytest.mark.timeout(77)
def test_a_limit_of_its_own_counts(request: pytest.FixtureRequest) -> None:
    assert limit_of(request.node) == 77.0
