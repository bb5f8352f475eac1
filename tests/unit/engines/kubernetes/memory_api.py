"""An API server in memory for unit tests: objects by path, and what was asked of it, in order."""

from collections.abc import Mapping
from typing import Any, cast

from mlbench_cli.kube.api import Api, ObjectNotFound, RequestRejected


class MemoryApi:
    """Keeps what is created, and merges patches at the first level of `metadata` and `spec`.

    `answers` are raised or returned by the next calls that begin with their key, e.g. "POST /apis".
    """

    def __init__(self, objects: Mapping[str, Any] | None = None) -> None:
        self.objects: dict[str, Any] = dict(objects or {})
        self.answers: dict[str, list[Any]] = {}
        self.calls: list[str] = []
        self.bodies: list[Any] = []
        self.server_ahead = 0.0

    def get(self, path: str, **params: Any) -> Any:
        """The object. Raises ObjectNotFound."""
        self._record("GET", path, params)
        if path not in self.objects:
            raise ObjectNotFound(f"{path} not found", status=404)
        return self.objects[path]

    def create(self, path: str, body: Mapping[str, Any]) -> Any:
        """Keep the object, with a uid. Raises RequestRejected (409) if its name is taken."""
        self._record("POST", path, body)
        place = f"{path}/{body['metadata']['name']}"
        if place in self.objects:
            raise RequestRejected(f"{place} already exists", status=409)
        self.objects[place] = {**body, "metadata": {"uid": f"uid of {body['metadata']['name']}", **body["metadata"]}}
        return self.objects[place]

    def patch(self, path: str, body: Mapping[str, Any]) -> Any:
        """Merge `body` into the object."""
        self._record("PATCH", path, body)
        found = self.objects[path]
        self.objects[path] = {**found, **{part: {**found.get(part, {}), **value} for part, value in body.items()}}
        return self.objects[path]

    def delete(self, path: str, **params: Any) -> bool:
        """Remove the object."""
        self._record("DELETE", path, params)
        return self.objects.pop(path, None) is not None

    @property
    def writes(self) -> list[str]:
        """All calls but GET."""
        return [call for call in self.calls if not call.startswith("GET")]

    @property
    def api(self) -> Api:
        """Itself, as the type that the product wants."""
        return cast(Api, self)

    def _record(self, method: str, path: str, body: Any) -> None:
        call = f"{method} {path}"
        self.calls.append(call)
        self.bodies.append(body)
        for beginning, answers in self.answers.items():
            if call.startswith(beginning) and answers and isinstance(answer := answers.pop(0), BaseException):
                raise answer
