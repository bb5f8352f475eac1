"""Ask the clouds whether quotas allow the best candidates of `mlbench plan`, as `create-cluster` does at first."""

import math
import shlex
from collections.abc import Sequence
from typing import Any

from mlbench_cli import console
from mlbench_cli.clusters.manage import CreationRequest, plan_cluster
from mlbench_cli.errors import CapacityError, CredentialError, MlbenchError
from mlbench_cli.predict.machines import HERE
from mlbench_cli.predict.plan import Candidate, Excluded, PlanResult, leave_out
from mlbench_cli.storage.store import Store
from providers import registry
from providers.base import CanCreate

MOST_QUESTIONS = 15
RELEASE = "plan"


def creation_options(item: Candidate) -> dict[str, Any]:
    """The options of `create-cluster` for a candidate, by the names of the providers' fields."""
    machine = item.offer.machine
    place = {"zone": f"{item.offer.region}-b"} if machine.provider == "gke" else {"region": item.offer.region}
    gpu = {"gpu_type": machine.gpu, "num_gpus": machine.gpus} if machine.priced_as else {}
    return {"machine_type": machine.name, **gpu, **place, **({"spot": True} if item.offer.is_spot else {})}


def creation_command(item: Candidate) -> str:
    """The command line that creates the cluster of a candidate."""
    options = creation_options(item)
    words = [word for name, value in options.items() for word in _words(name, value)]
    hours = max(1, math.ceil(item.high / 3600))
    provider = item.offer.machine.provider
    return shlex.join(["mlbench", "create-cluster", provider, str(item.workers), RELEASE, *words, "--ttl", f"{hours}h"])


def _words(name: str, value: Any) -> Sequence[str]:
    flag = f"--{name.replace('_', '-')}"
    return [flag] if value is True else [flag, str(value)]


def leave_out_refused(store: Store, result: PlanResult) -> PlanResult:
    """The plan without what quotas or a lack of capacity refuse now.

    The best candidates are asked for, until all of them are allowed or MOST_QUESTIONS were asked. A refusal also leaves
    out the same machines in larger numbers. A cloud without credentials is not asked; this, and any other error, is a
    warning. Raises UsageError if nothing remains.
    """
    asked: set[tuple[object, int]] = set()
    silent: set[str] = set()
    for _ in range(MOST_QUESTIONS):
        item = next((item for item in result.best if _is_open(item, asked, silent)), None)
        if item is None:
            break
        name = item.offer.machine.provider
        asked.add((item.offer, item.workers))
        console.note(f"Asking {name} for {item.workers} x {item.offer.machine} in {item.offer.region} …")
        try:
            _ask(store, item)
        except CapacityError as error:
            hint = (error.hint or "").partition("\n")[0]
            result = leave_out(result, item.offer, item.workers, Excluded(error.message.rstrip("."), 0, hint))
        except CredentialError as error:
            silent.add(name)
            console.warn(f"Quotas of {name} were not checked: {error.message}")
        except MlbenchError as error:
            console.warn(f"{item.workers} x {item.offer.machine} in {item.offer.region}: {error.message}")
    return result


def _is_open(item: Candidate, asked: set[tuple[object, int]], silent: set[str]) -> bool:
    name = item.offer.machine.provider
    return name != HERE and name not in silent and (item.offer, item.workers) not in asked


def _ask(store: Store, item: Candidate) -> None:
    """Plan the cluster of a candidate. Raises what `create-cluster` would raise before it creates anything."""
    provider = registry.load(item.offer.machine.provider)
    assert isinstance(provider, CanCreate)
    with plan_cluster(store, CreationRequest(provider, item.workers, RELEASE, creation_options(item))) as planned:
        for warning in planned.plan.warnings:
            console.warn(warning)
