"""Run a command in a pod through the API, to see whether a websocket is opened as other requests are."""

import json
from collections.abc import Sequence

import websocket

from mlbench_cli.engines.kubernetes.channel import PROTOCOLS, STATUS, STDOUT
from mlbench_cli.kube.access import Access


def execute(access: Access, pod: str, command: Sequence[str]) -> bytes:
    """Its standard output. AssertionError if it fails."""
    query = [("container", "main"), ("stdout", "true"), ("stderr", "true"), *(("command", part) for part in command)]
    with access.client() as api:
        connection = api.open_websocket(f"/api/v1/namespaces/default/pods/{pod}/exec", query, PROTOCOLS)
    output = b""
    connection.settimeout(60)
    try:
        while True:
            opcode, data = connection.recv_data()
            assert opcode != websocket.ABNF.OPCODE_CLOSE
            if data[:1] == bytes([STDOUT]):
                output += data[1:]
            elif data[:1] == bytes([STATUS]):
                assert json.loads(data[1:])["status"] == "Success"
                return output
    finally:
        connection.shutdown()  # type: ignore[no-untyped-call]
