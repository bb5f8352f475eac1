"""Checks with Compute Engine before anything is created: machine types of the zone, quotas."""

import os
import time
from typing import Any

from mlbench_cli.errors import CapacityError, MlbenchError, NotFoundError, UsageError
from providers.base import TransientError, call_timeout
from providers.gke import api
from providers.gke.machines import Machine

ENDPOINT = "https://compute.googleapis.com"
# What the quota of a GPU is called, in a region; a spot machine's has PREEMPTIBLE_ before it.
QUOTA_OF = {
    "nvidia-tesla-t4": "NVIDIA_T4_GPUS",
    "nvidia-l4": "NVIDIA_L4_GPUS",
    "nvidia-tesla-a100": "NVIDIA_A100_GPUS",
    "nvidia-a100-80gb": "NVIDIA_A100_80GB_GPUS",
    "nvidia-h100-80gb": "NVIDIA_H100_GPUS",
    "nvidia-h100-mega-80gb": "NVIDIA_H100_MEGA_GPUS",
}
ALL_GPUS = "GPUS_ALL_REGIONS"


def check_machines(project: str, zones: list[str], machine: Machine, count: int, spot: bool) -> list[str]:
    """Warnings about what may not work. Raises UsageError or CapacityError for what surely will not."""
    compute = Compute(project)
    try:
        for zone in zones:
            compute.has(zone, machine)
        if not machine.gpu or not count:
            return []
        return compute.quota(api.region_of(zones[0]), machine, count, spot)
    except (UsageError, CapacityError, NotFoundError):
        raise
    except TransientError:
        raise
    except MlbenchError as error:
        if error.hint in (api.LOGIN, api.SET_CLOCK):  # it is not that one may not ask: one is nobody
            raise
        return [f"Whether {', '.join(zones)} has the machines and the quota allows them is not known: {error.message}"]


class Compute:
    """Compute Engine's REST API, read only."""

    def __init__(self, project: str) -> None:
        from google.auth.transport.requests import AuthorizedSession

        self.project = project
        self.date: str | None = None  # what the last answer told of the time, and when it came
        self.asked = 0.0
        self._session: Any = AuthorizedSession(api.credentials()[0], auth_request=api.sign_in())
        self._base = f"{os.environ.get('MLBENCH_COMPUTE_ENDPOINT', ENDPOINT)}/compute/v1/projects/{project}"

    def has(self, zone: str, machine: Machine) -> None:
        """Raises UsageError if the zone has no such machine, or not the GPU that is to be attached to it."""
        self.offers(zone, "machineTypes", machine.name)
        if machine.gpu and machine.name.startswith("n1-"):
            self.offers(zone, "acceleratorTypes", machine.gpu)

    def zone_with(self, region: str, machine: Machine) -> str:
        """The first zone of a region that has the machine. Raises UsageError if none has, or there is no region."""
        try:
            zones = sorted(str(url).rpartition("/")[2] for url in self._get(f"/regions/{region}").get("zones", []))
        except NotFoundError:
            raise UsageError(f'There is no region "{region}".', hint="gcloud compute regions list") from None
        for zone in zones:
            try:
                self.has(zone, machine)
            except UsageError:
                continue
            return zone
        raise UsageError(
            f"No zone of {region} has {machine.name}.",
            hint=f"gcloud compute machine-types list --filter=name={machine.name} --project {self.project}",
        )

    def offers(self, zone: str, collection: str, name: str) -> None:
        """Raises UsageError if the zone has no such machine or GPU, or is none."""
        try:
            self._get(f"/zones/{zone}/{collection}/{name}")
        except NotFoundError:
            self._zone(zone)
            raise UsageError(
                f"The zone {zone} has no {name}.",
                hint=f"gcloud compute {_gcloud(collection)} list --filter=name={name} --project {self.project}",
            ) from None

    def quotas(self, region: str) -> dict[str, Any]:
        """What Compute Engine tells of each quota of the project, in the region and in all: limit and usage."""
        answers = (self._get(f"/regions/{region}"), self._get(""))
        return {item["metric"]: item for answer in answers for item in answer.get("quotas", [])}

    def gpus(self, place: str) -> list[str]:
        """The GPUs that a zone offers, those that mlbench knows. Raises UsageError if there is no such zone."""
        if api.region_of(place) == place:
            raise UsageError(f"{place} is a region.", hint="What GPUs there are is told of a zone: --zone")
        self._zone(place)
        found = {item["name"] for item in self._get(f"/zones/{place}/acceleratorTypes").get("items", [])}
        return [name for name in QUOTA_OF if name in found]

    def quota(self, region: str, machine: Machine, count: int, spot: bool) -> list[str]:
        """Raises CapacityError if less is left than is asked for."""
        wanted = count * machine.gpus
        names = [QUOTA_OF.get(machine.gpu or "", "")]
        if spot and names[0]:
            names = [f"PREEMPTIBLE_{names[0]}"]
        found = self.quotas(region)
        told = []
        for name in [*filter(None, names), ALL_GPUS]:
            if name not in found:
                continue
            left = found[name]["limit"] - found[name]["usage"]
            if left < wanted:
                raise CapacityError(
                    f"The quota {name} of {self.project} in {region} has {left:g} of {found[name]['limit']:g} left; "
                    f"{count} × {machine.name} need {wanted}.",
                    hint=f"Ask for more at {api.QUOTAS}{self.project}, or for fewer or other machines.",
                    details={"reason": "quota", "quota": name, "left": left, "needed": wanted},
                )
            told.append(name)
        return [] if told else [f"No quota of {machine.gpu} is known in {region}; it may still be refused."]

    def _zone(self, zone: str) -> None:
        try:
            self._get(f"/zones/{zone}")
        except NotFoundError:
            raise UsageError(f'There is no zone "{zone}".', hint="gcloud compute zones list") from None

    def _get(self, path: str) -> dict[str, Any]:
        from google.api_core import exceptions
        from requests import exceptions as http

        with api.map_cloud_errors(f"tell of {path or self.project}", self.project):
            try:
                answer = self._session.get(f"{self._base}{path}", timeout=call_timeout())
            except http.RequestException as error:
                raise TransientError(f"Compute Engine cannot be reached: {error}") from None
            self.date, self.asked = answer.headers.get("Date"), time.time()
            if answer.status_code >= 400:
                raise exceptions.from_http_response(answer)
            document: dict[str, Any] = answer.json()
            return document


def _gcloud(collection: str) -> str:
    return {"machineTypes": "machine-types", "acceleratorTypes": "accelerator-types"}[collection]
