"""What EKS' machines start with, when a group that gets no more of them is given up, and AWS' limits for them."""

from datetime import date, timedelta
from typing import Any

import pytest

from mlbench_cli.errors import UsageError
from mlbench_cli.model.run import Cluster
from providers.eks.options import EksOptions
from providers.eks.provider import EksProvider
from providers.eks.quota import Version, choose_version

# --- AWS' limits ----------------------------------------------------------------------------------------------------


def new_cluster(count: int = 2, **options: Any) -> Cluster:
    return EksProvider().new_cluster("demo-2", count, EksOptions(region="eu-west-1", **options))


@pytest.mark.parametrize(("size", "is_allowed"), [(19, False), (20, True), (16384, True), (16385, False)])
def test_a_gp3_disk_has_up_to_16_tib_and_room_for_the_image_with_a_driver(size: int, is_allowed: bool) -> None:
    if is_allowed:
        assert new_cluster(disk_size=size).details["options"]["disk_size"] == size
    else:
        with pytest.raises(UsageError, match="from 20 to 16384 GB"):
            new_cluster(disk_size=size)


# --- versions -------------------------------------------------------------------------------------------------------

TODAY = date(2026, 11, 1)


@pytest.mark.parametrize(("days", "chosen"), [(61, "1.33"), (60, "1.34"), (-1, "1.34")])
def test_a_default_whose_support_ends_within_60_days_is_passed_over(days: int, chosen: str) -> None:
    newest = Version("1.34", TODAY + timedelta(days=400), is_default=False)
    default = Version("1.33", TODAY + timedelta(days=days), is_default=True)
    found = choose_version([newest, default], TODAY)
    assert found is not None
    assert found.name == chosen
