"""Which tests one worker runs one after the other."""

import pytest

from tests.grouping import TRAINING_GROUPS, group_of


@pytest.mark.parametrize(
    ("fixtures", "group"),
    [({}, None), ({"home": "function"}, None), ({"a": "module"}, "tests/x.py"), ({"a": "session"}, "tests/x.py")],
)
def test_tests_that_share_a_fixture_are_a_group(fixtures: dict[str, str], group: str | None) -> None:
    assert group_of("tests/x.py", fixtures) == group


def test_trainings_are_few_groups_and_a_file_is_in_one() -> None:
    groups = [group_of(f"tests/{number}.py", {"ranks": "session", "runs": "module"}) for number in range(100)]
    assert len(set(groups)) == TRAINING_GROUPS
    assert group_of("tests/1.py", {"ranks": "session"}) == groups[1]
