"""Requests to the store do not grow with the number of ranks."""

import pytest

from tests.unit.task_images.store_requests import count


@pytest.mark.parametrize("size", [4, 64])
def test_a_rank_makes_fourteen_requests_at_most(size: int) -> None:
    """Three in each of four meetings, and one more where a rank is the last to leave its address."""
    assert max(requests for requests, _ in count(size)) <= 14
