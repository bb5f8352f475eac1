"""Run a command in a container over a websocket.

The official client opens it, but its reader (WSClient) is not used: it mixes standard output and error, copies all
output with each frame, and reports a cut connection as success.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mlbench_cli.kube.access import Access
from mlbench_cli.kube.api import ApiError

# v5 adds the end of standard input, which is not needed. If a client offers v5, the API server translates every frame
# of the kubelet instead of forwarding it, which takes 1.5x as long.
PROTOCOLS = ["v4.channel.k8s.io"]
STDOUT, STDERR, STATUS = 1, 2, 3
IDLE_SECONDS = 30.0
STDERR_BYTES = 4096


class ExecBroken(ApiError):
    """The connection ended before the command's status came: the output may be incomplete."""


@dataclass(frozen=True)
class Executed:
    """`code` is the command's exit code. `stdout` is empty if a sink took it."""

    code: int
    stdout: bytes
    stderr: str


def execute(
    access: Access,
    namespace: str,
    pod: str,
    command: Sequence[str],
    *,
    sink: Callable[[bytes], object] | None = None,
    idle_seconds: float = IDLE_SECONDS,
) -> Executed:
    """Run `command` in the pod and wait for its end. Standard output goes to `sink` in chunks, or is returned.

    Raises ExecBroken if the end is unknown, ApiError if the server rejects it (400: the container has ended).
    """
    import websocket

    query = [("container", "main"), ("stdout", "true"), ("stderr", "true"), *(("command", part) for part in command)]
    with access.client() as api:
        connection = api.open_websocket(f"/api/v1/namespaces/{namespace}/pods/{pod}/exec", query, PROTOCOLS)
    output, errors = bytearray(), bytearray()
    take = sink or output.extend
    connection.settimeout(idle_seconds)
    try:
        while True:
            try:
                opcode, data = connection.recv_data()
            except (websocket.WebSocketException, OSError) as error:
                raise ExecBroken(f"The connection to the pod {pod} broke: {error}") from None
            if opcode == websocket.ABNF.OPCODE_CLOSE:
                raise ExecBroken(f"The connection to the pod {pod} was closed before the command had ended.")
            channel, payload = data[0] if data else 0, data[1:]
            if channel == STDOUT and payload:
                take(payload)
            elif channel == STDERR:
                errors += payload[: STDERR_BYTES - len(errors)]
            elif channel == STATUS:
                return Executed(_exit_code(payload), bytes(output), errors.decode("utf-8", "replace"))
    finally:
        connection.shutdown()  # type: ignore[no-untyped-call]


def _exit_code(status: bytes) -> int:
    try:
        document = json.loads(status)
        if document.get("status") == "Success":
            return 0
        causes = (document.get("details") or {}).get("causes") or ()
        for cause in causes:
            if cause.get("reason") == "ExitCode":
                return int(cause["message"])
        message = str(document.get("message"))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ExecBroken(f"The pod's answer is not a status: {error}") from None
    raise ApiError(f'The command could not be run in the pod: "{message}"', status=500, reason="ExecFailed")
