"""The plan of a cluster in each cloud: its priced parts, and each warning with what causes it."""

from typing import Any

import pytest

from providers.aks import provider as aks
from providers.gke import provider as gke
from providers.gke.options import GkeOptions
from providers.gke.quota import Purchase

# --- AKS ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gigabytes", "disk"),
    [
        *((1, "disk-p4"), (32, "disk-p4"), (33, "disk-p6"), (64, "disk-p6"), (65, "disk-p10"), (128, "disk-p10")),
        *((129, "disk-p15"), (256, "disk-p15"), (257, "disk-p20"), (512, "disk-p20"), (513, "disk-p30")),
        *((1024, "disk-p30"), (1025, "disk-p40"), (2048, "disk-p40")),
    ],
)
def test_a_premium_disk_of_azure_is_billed_by_the_next_size(gigabytes: int, disk: str) -> None:
    """https://learn.microsoft.com/azure/virtual-machines/disks-types#premium-ssds: P4 has 32 GiB, P40 has 2048."""
    assert aks.disk_of(gigabytes) == disk


# --- GKE ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "purchase"),
    [
        ({}, Purchase.ON_DEMAND),
        ({"spot": True}, Purchase.SPOT),
        ({"flex_start": True}, Purchase.FLEX_START),
    ],
)
def test_the_options_tell_how_machines_are_bought(options: Any, purchase: Purchase) -> None:
    assert gke.purchase_of(GkeOptions(**options)) is purchase


# --- EKS ------------------------------------------------------------------------------------------------------------
