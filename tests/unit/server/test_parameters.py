"""Query parameters of the REST API, and the task names of the first edition's clients."""

import pytest

from mlbench_cli.errors import UsageError
from mlbench_cli.server.original import TASKS
from mlbench_cli.server.rest import whole_number
from mlbench_cli.tasks.catalog import load_catalog


@pytest.mark.parametrize(("text", "value"), [(None, 7), ("", 7), ("0", 0), ("12", 12), ("100", 100)])
def test_a_whole_number(text: str | None, value: int) -> None:
    assert whole_number(text, "limit", default=7, most=100) == value


@pytest.mark.parametrize("text", ["-1", "101", "1.5", "x", "٣", "0" * 17])
def test_what_is_no_whole_number_in_range_is_quoted(text: str) -> None:
    with pytest.raises(UsageError, match="is not a whole number from 0 to 100"):
        whole_number(text, "limit", most=100)


def test_every_image_of_the_first_edition_has_a_task() -> None:
    assert set(TASKS.values()) <= set(load_catalog())
