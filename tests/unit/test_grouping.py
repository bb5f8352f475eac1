"""Which tests one worker runs one after the other."""

import pytest

from tests.grouping import group_of


@pytest.mark.parametrize(
    ("fixtures", "group"),
    [
        ({}, None),
        ({"ranks": "session"}, None),
        ({"ranks": "session", "a": "module"}, "tests/x.py"),
        ({"home": "function"}, None),
        ({"a": "module"}, "tests/x.py"),
        ({"a": "session"}, "tests/x.py"),
    ],
)
def test_tests_that_share_a_fixture_are_a_group(fixtures: dict[str, str], group: str | None) -> None:
    assert group_of("tests/x.py", fixtures) == group
