"""Workers in the first of several zones that has the machines: what an earlier try left is removed by the next one."""

from collections.abc import Callable

from mlbench_cli.errors import CapacityError
from mlbench_cli.model.cluster_details import ClusterDetails
from mlbench_cli.model.run import Cluster
from providers.base import Provider

# Reasons in the details of a CapacityError that another zone of the region does not change.
REGIONAL_REASONS = ("quota", "reservation")


def create_in_first_zone(
    provider: Provider,
    cluster: Cluster,
    known: Cluster | None,
    create: Callable[[Cluster], Cluster],
    warn: Callable[[str], None],
) -> Cluster:
    """Create the cluster, with its workers in the first of its zones that has them; the others are tried in turn.

    `known` is its record of an earlier time: the zone of its workers comes first. Raises the last zone's error, and
    any other error than a lack of machines at once.
    """
    zones = list(provider.list_zones(cluster))
    if not zones:
        return create(cluster)
    earlier = ClusterDetails.of(known).location if known is not None else None
    zones.sort(key=lambda zone: zone != earlier)
    for number, zone in enumerate(zones, 1):
        try:
            return create(provider.place_workers(cluster, zone))
        except CapacityError as error:
            if error.details.get("reason") in REGIONAL_REASONS:
                raise
            if number == len(zones):
                raise CapacityError(
                    f"None of the zones {', '.join(zones)} has the machines. {error.message}",
                    hint=error.hint,
                    details={**error.details, "zones": zones},
                ) from error
            reason = error.message.partition("\nOf the cluster")[0]
            warn(f"{zone}: {reason} Removing its partly created workers, then trying {zones[number]}.")
    raise AssertionError("unreachable")
