"""A channel to a run's head in its pod: what ssh is for hosts, an exec of the Kubernetes API is here.

The official client opens the websocket, but its reader (WSClient) is not used: it mixes standard output and error,
copies all output with each frame, and reports a cut connection as success.
"""

import re
import shlex
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from mlbench_cli.agent.channel import BOOT, Channel, Target
from mlbench_cli.errors import MissingRight, MlbenchError, UnreachableError
from mlbench_cli.kube.access import Access
from mlbench_cli.kube.api import AccessDenied, ApiError, NodeUnreachable, is_policy
from mlbench_cli.kube.official import official

# v5 adds the end of standard input, which is not needed. If a client offers v5, the API server translates every frame
# of the kubelet instead of forwarding it, which takes 1.5x as long.
PROTOCOLS = ["v4.channel.k8s.io"]
STDIN, STDOUT, STDERR, STATUS = range(4)
STDERR_BYTES = 4096
USER = re.compile(r'User "([^"]+)"')  # in the server's refusals
FRAME = 1 << 16
# Runs `BOOT` with whichever Python the image has; "~" is then the folder that has the run's, in every pod.
COMMAND = (
    'export HOME="${MLBENCH_WORK_DIR:-$HOME}"; '
    'for python in python3 python; do command -v "$python" >/dev/null && exec "$python" -I -S -u -c "$1"; done'
)


class HeadMissing(UnreachableError):
    """No pod of the run's head is running."""

    code = "head_missing"


class PodChannel(Channel):
    """Requests to the program that answers in the pod that `find_pod` names; None while there is none."""

    def __init__(self, access: Access, namespace: str, name: str, find_pod: Callable[[], str | None]) -> None:
        super().__init__(Target(name))
        self._access, self._namespace, self._find_pod = access, namespace, find_pod
        self._websocket: Any = None  # a websocket.WebSocket
        self._said = b""

    def close(self) -> None:
        """End the program at the other end. A later request connects again."""
        with self._lock:
            connection, self._websocket = self._websocket, None
            if connection is not None:
                connection.shutdown()

    def _connect(self, end: float) -> None:
        if self._websocket is not None:
            return
        pod = self._find_pod()
        if pod is None:
            raise HeadMissing(f"{self.target.name} is not running.")
        command = ["sh", "-c", COMMAND, "sh", BOOT]
        query = [(name, "true") for name in ("stdin", "stdout", "stderr")]
        query += [("container", "main"), *(("command", word) for word in command)]
        try:
            with self._access.client() as api:
                path = f"/api/v1/namespaces/{self._namespace}/pods/{pod}/exec"
                self._websocket = api.open_websocket(path, query, PROTOCOLS)
        except AccessDenied as error:
            raise _missing_right(self.target.name, self._namespace, error.message) from None
        except NodeUnreachable as error:  # until the cluster, too, has noticed that the node is gone
            raise UnreachableError(error.message, hint=error.hint) from None
        except ApiError as error:
            if error.status in (400, 404, 500):  # the container has ended, the pod is gone, or its node is silent
                raise HeadMissing(f"{self.target.name} does not answer: {error.message}") from None
            raise
        self._said = b""
        self._start_server(end)

    def _send(self, data: bytes, end: float) -> None:
        assert self._websocket is not None
        self._websocket.settimeout(max(0.1, end - time.monotonic()))
        with self._explained():
            for start in range(0, len(data), FRAME):
                self._websocket.send_binary(bytes([STDIN]) + data[start : start + FRAME])

    def _receive(self, end: float) -> bytes:
        assert self._websocket is not None
        self._websocket.settimeout(max(0.1, end - time.monotonic()))
        with self._explained():
            opcode, data = self._websocket.recv_data()
        if opcode == official().websocket.ABNF.OPCODE_CLOSE:
            raise self._problem("the connection was closed")
        channel, payload = data[0] if data else STDIN, data[1:]
        if channel == STATUS:
            raise self._problem("its program has ended")
        if channel == STDERR:
            self._said = (self._said + payload)[-STDERR_BYTES:]
        return payload if channel == STDOUT else b""

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Convert what a broken websocket raises into the channel's error."""
        try:
            yield
        except (official().websocket.WebSocketException, OSError) as error:
            raise self._problem(str(error) or type(error).__name__) from None

    def _problem(self, what: str) -> MlbenchError:
        lines = self._said.decode("utf-8", "replace").strip().splitlines()
        return UnreachableError(f"{self.target.name} does not answer: {lines[-1] if lines else what}.")


def _missing_right(target: str, namespace: str, refusal: str) -> MissingRight:
    """The error of a user who may list the run's pods, but not execute anything in them."""
    if is_policy(refusal):
        words = f"mlbench cannot read {target}, because a policy of the cluster forbids kubectl exec. {refusal}"
        return MissingRight(words, hint="Ask the cluster's administrator for an exception.")
    return MissingRight(
        f"mlbench cannot read {target} without the right to get and create pods/exec in {namespace}. {refusal}",
        hint=f"{grant('pods/exec', 'get,create', namespace, refusal)}   Then repeat the command.",
    )


def grant(resource: str, verbs: str, namespace: str, refusal: str) -> str:
    """The commands that give the user of a refused request a right."""
    name, user, create = (
        f"mlbench-{resource.rpartition('/')[2]}",
        USER.search(refusal),
        f"kubectl -n {namespace} create",
    )
    return (
        f"{create} role {name} --verb={verbs} --resource={resource} && {create} rolebinding {name} --role={name} "
        f"--user={shlex.quote(user[1]) if user else 'USER'}"
    )
