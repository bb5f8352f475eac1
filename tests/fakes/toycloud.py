"""A cloud of a page, in one file on disk, for tests of the life-cycle: rules and time of its own, and a request log.

Names are unique. A thing can be made only on ready things that it stands on, and removed only when nothing stands on
it. Making and removing take a number of looks. Trouble is ordered by the number of the request that it is to befall.
"""

import fcntl
import json
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mlbench_cli.errors import CapacityError, MlbenchError
from providers.base import Readiness, Resource, ResourceStatus, TransientError

LOOKS = 3


class ToyCloud:
    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.exists():
            path.write_text(json.dumps({"things": {}, "log": [], "trouble": {}}))

    def order(self, request: int | str, trouble: str) -> None:
        """Trouble at the request of that number (from 0), or at all of that verb, or of that verb and name.

        kill-before kill-after stop-after (Ctrl-C) busy-before busy-after, refuse, lie (done, yet answered by an error).
        """
        with self._state() as state:
            state["trouble"][str(request)] = trouble

    def calm(self) -> None:
        with self._state() as state:
            state["trouble"], state["log"] = {}, []

    @property
    def things(self) -> dict[str, Any]:
        with self._state() as state:
            return dict(state["things"])

    @property
    def log(self) -> list[str]:
        with self._state() as state:
            return list(state["log"])

    def request(self, verb: str, name: str, **more: Any) -> Any:
        with self._state() as state:
            asked = [str(len(state["log"])), verb, f"{verb} {name}"]
            trouble = next((state["trouble"][key] for key in asked if key in state["trouble"]), "")
            state["log"].append(f"{verb} {name}")
            if trouble != "refuse" and not trouble.endswith("-before"):
                answer = getattr(self, f"_{verb}")(state["things"], name, **more)
        if trouble.startswith("kill"):
            os.kill(os.getpid(), signal.SIGKILL)
        if trouble.startswith("stop"):
            os.kill(os.getpid(), signal.SIGINT)
        if trouble.startswith("busy"):
            raise TransientError("the cloud says: 503 try again")
        if trouble == "lie":
            raise MlbenchError("the cloud says: it failed")
        if trouble == "refuse":
            raise CapacityError("the cloud says: quota of things exceeded")
        return answer

    def _find(self, things: dict[str, Any], name: str) -> Any:
        thing = things.get(name)
        if thing is None or thing["state"] not in ("making", "removing"):
            return thing
        thing["looks"] -= 1
        if thing["looks"] <= 0 and thing["state"] == "removing":
            del things[name]
            return None
        if thing["looks"] <= 0:
            thing["state"] = "ready"
        return thing

    def _create(self, things: dict[str, Any], name: str, owner: str, on: list[str]) -> None:
        if name in things:
            raise MlbenchError(f"the cloud says: {name} exists")
        if any(things.get(below, {}).get("state") != "ready" for below in on):
            raise MlbenchError(f"the cloud says: what {name} stands on is not ready")
        things[name] = {"owner": owner, "on": on, "state": "making", "looks": LOOKS}

    def _delete(self, things: dict[str, Any], name: str) -> None:
        if name not in things:
            return
        if any(name in thing["on"] for thing in things.values()):
            raise TransientError(f"the cloud says: something stands on {name}")
        things[name].update(state="removing", looks=LOOKS)

    @contextmanager
    def _state(self) -> Iterator[dict[str, Any]]:
        with open(self.path, "r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            state = json.load(file)
            yield state
            file.seek(0)
            file.truncate()
            json.dump(state, file)


class Thing(Resource):
    kind = "thing"
    create_seconds = 100.0
    delete_seconds = 100.0

    def __init__(self, cloud: ToyCloud, cluster: str, part: str, needs: Sequence["Thing"] = ()) -> None:
        self.cloud = cloud
        self.cluster = cluster
        self.name = f"{cluster}-{part}"
        self.needs = needs
        self.remove_command = f"toy remove {self.name}"

    def find(self) -> ResourceStatus | None:
        thing = self.cloud.request("find", self.name)
        if thing is None:
            return None
        state = thing["state"]
        return ResourceStatus(
            state,
            ours=thing["owner"] == self.cluster,
            deleting=state == "removing",
            broken="it burnt down" if state == "broken" else None,
            differs="it is blue" if state == "blue" else None,
            kept="others use it" if state == "shared" else None,
        )

    def create(self) -> None:
        self.cloud.request("create", self.name, owner=self.cluster, on=[need.name for need in self.needs])

    def poll(self) -> Readiness:
        state = self.cloud.request("find", self.name)["state"]
        return Readiness(state in ("ready", "shared"), f"it is {state}")

    def delete(self) -> None:
        self.cloud.request("delete", self.name)


def toy_resources(cloud: ToyCloud, cluster: str) -> list[Resource]:
    """A network, a control plane on it, two pools on that, and an add-on on one of the pools."""
    network = Thing(cloud, cluster, "network")
    plane = Thing(cloud, cluster, "plane", [network])
    small = Thing(cloud, cluster, "small", [plane])
    large = Thing(cloud, cluster, "large", [plane])
    return [network, plane, small, large, Thing(cloud, cluster, "addon", [small])]
