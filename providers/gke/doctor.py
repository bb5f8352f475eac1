"""What can be known of a Google project before a cluster is made in it."""

from collections.abc import Iterator
from typing import Any

from providers import doctor
from providers.doctor import Asking, Check
from providers.gke import DEFAULT_ZONE, api
from providers.gke.api import Gke
from providers.gke.compute import ALL_GPUS, QUOTA_OF, Compute

# Quotas that every cluster needs something of, besides those of GPUs.
COMMON_QUOTAS = ("CPUS", "IN_USE_ADDRESSES", "SSD_TOTAL_GB")


def checks(project: str | None, location: str | None) -> Iterator[Check]:
    asking = Asking("gke")
    yield (found := doctor.library(asking, "google-cloud-container", "2.57", "gke"))
    if found.state == "failed":
        return
    zone = location or DEFAULT_ZONE
    name = asking("credentials", lambda: _signed_in(project))
    if name is None:
        yield asking.failed or found
        return
    yield asking.line("credentials", f"{_kind()}, project {name}")
    yield from _cluster_manager(asking, Gke(name, zone))
    yield from _compute(asking, Compute(name), zone)
    yield doctor.prices(asking, "gke", api.region_of(zone))
    yield doctor.program(asking, "gcloud", "hints name its commands")


def _signed_in(project: str | None) -> str:
    """The project, once a token was really given out for the credentials."""
    name = api.project_of(project)
    api.token()()
    return name


def _kind() -> str:
    found = api.credentials()[0]
    account = getattr(found, "service_account_email", None) or getattr(found, "account", None)
    return f"{type(found).__module__.rpartition('.')[2].replace('_', ' ')}{f' {account}' if account else ''}"


def _cluster_manager(asking: Asking, gke: Gke) -> Iterator[Check]:
    """container.googleapis.com: enabled, allowed, which Kubernetes it has, and which clusters of ours."""
    config = asking("API container", lambda: gke.call("get_server_config", name=gke.parent))
    if config is None:
        if asking.failed:
            yield asking.failed
        return
    yield asking.line("API container", f"enabled, and answers for {gke.location}")
    yield asking.line("Kubernetes", _versions(config))
    yield doctor.ours(asking, lambda: _discovered(gke.project))


def _discovered(project: str) -> list[Any]:
    from providers.gke.discovery import discovered

    return list(discovered(project, "-"))


def _versions(config: Any) -> str:
    regular = next((item for item in config.channels if item.channel.name == "REGULAR"), None)
    valid = list(regular.valid_versions if regular is not None else config.valid_master_versions)
    default = (regular.default_version if regular is not None else "") or config.default_cluster_version
    told = ", ".join(dict.fromkeys(".".join(version.split(".")[:2]) for version in valid))
    return f"{told} in the channel regular{f', {default} by default' if default else ''}"


def _compute(asking: Asking, compute: Compute, place: str) -> Iterator[Check]:
    """compute.googleapis.com: enabled, the GPUs of the zone, and how much of each quota is left."""
    quotas = asking("API compute", lambda: compute.quotas(api.region_of(place)))
    if quotas is None:
        if asking.failed:
            yield asking.failed
        return
    yield asking.line("API compute", "enabled")
    yield doctor.clock(asking, compute.date, compute.asked)
    zone = asking("GPUs", lambda: compute.gpus(place), optional=True)
    if zone is not None:
        yield asking.line("GPUs", f"in {place}: {', '.join(zone) or 'none'}", missing=not zone)
    elif asking.failed:
        yield asking.failed
    yield from _quotas(asking, compute.project, quotas)


def _quotas(asking: Asking, project: str, quotas: dict[str, Any]) -> Iterator[Check]:
    gpus = [name for name in QUOTA_OF.values() if name in quotas]
    spot = [f"PREEMPTIBLE_{name}" for name in gpus if f"PREEMPTIBLE_{name}" in quotas]
    for name in [*(name for name in COMMON_QUOTAS if name in quotas), ALL_GPUS, *gpus, *spot]:
        if name not in quotas:
            continue
        left = quotas[name]["limit"] - quotas[name]["usage"]
        hint = f"Ask for more at {api.QUOTAS}{project}"
        yield asking.line(f"quota {name}", f"{left:g} of {quotas[name]['limit']:g} left", hint, missing=left <= 0)
    if not gpus:
        hint = f"A request for GPUs may still be refused: {api.QUOTAS}{project}"
        yield asking.line("quota of GPUs", "none is told", hint, missing=True)
