"""Starts the AWS double in a process of its own, and gives it orders."""

import atexit
import json
import os
import signal
import urllib.request
from typing import Any

from tests.fakes import aws_process
from tests.fakes.aws_kube import SECRET

LOADING_SECONDS = 280  # at most, on a busy machine, until a new double answers


class AwsClient:
    """A double that runs somewhere."""

    def __init__(self, port: int, pid: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.pid = pid

    def environment(self, client: str, region: str = "eu-west-1") -> dict[str, str]:
        """What makes a process a client of the double: AWS' own variables, and no files of the user."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": client,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": region,
            "AWS_MAX_ATTEMPTS": "1",
            "AWS_CONFIG_FILE": "/dev/null",
            "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def become(self, client: str, region: str = "eu-west-1") -> None:
        os.environ.update(self.environment(client, region))

    def order(self, client: str, kind: str, **more: Any) -> None:
        """Trouble for a client: at the request `number`, or at the next `times` whose "service:Action target" matches
        `action` in `region`, but for the first `skip`; with `once_each` at the first of each such text.

        A kind that ends in -after comes when all is done.
        """
        self._control("trouble", client=client, kind=kind, **more)

    def calm(self, client: str) -> None:
        self._control("calm", client=client)

    def log(self, client: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._control("log", client=client)
        return found

    def rules(self, **rules: Any) -> None:
        self._control("rules", **rules)

    def list_left(self, name: str, region: str = "eu-west-1") -> list[str]:
        """All that there is of a cluster of that name."""
        found: list[str] = self._control("left", name=name, region=region)
        return found

    def state(self, name: str, region: str = "eu-west-1") -> tuple[str, ...]:
        """The situation that a cluster is in, without its name."""
        return tuple(self._control("state", name=name, region=region))

    def pass_time(self, seconds: float) -> list[str]:
        """What AWS does by itself within `seconds`: the node groups whose machines are taken away."""
        found: list[str] = self._control("later", seconds=seconds)
        return found

    def copy(self) -> "AwsClient":
        """A double with all that is in this one now; it ends with this one, or by `stop`."""
        return AwsClient(**self._control("copy"))

    def stop(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def _control(self, what: str, **given: Any) -> Any:
        request = urllib.request.Request(f"{self.url}/_double/{what}", json.dumps(given).encode())
        with urllib.request.urlopen(request, timeout=LOADING_SECONDS) as answer:
            return json.load(answer)


class AwsServer(AwsClient):
    """A double of one's own. While it loads moto, requests wait."""

    def __init__(self) -> None:
        listener = aws_process.listen()
        port = listener.getsockname()[1]
        self._process = aws_process.start(listener)
        super().__init__(port, self._process.pid)

    def stop(self) -> None:
        super().stop()
        self._process.wait(60)


def find_aws() -> AwsClient:
    """The double of the session, or one of this process."""
    if port := os.environ.get(aws_process.SHARED):
        return AwsClient(int(port), 0)  # only its copies are stopped
    server = AwsServer()
    atexit.register(server.stop)
    return server
