"""A real dashboard process for tests, and requests to it exactly as written."""

import http.client
import json
import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.contract.clients import start

PATIENCE = 150.0
# Uses a part of a core: other tests run meanwhile.
BUSY = "sh -c 'while :; do i=0; while [ $i -lt 4000 ]; do i=$((i+1)); done; sleep 0.1; done'"
CODE = "import sys; from mlbench_cli.__main__ import main; sys.exit(main())"


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def document(self) -> Any:
        return json.loads(self.body)


@dataclass(frozen=True)
class Dashboard:
    """A dashboard that runs."""

    home: Path
    port: int
    token: str
    url: str
    pid: int

    def ask(
        self,
        path: str,
        method: str = "GET",
        headers: Mapping[str, str] | None = None,
        body: bytes | None = None,
        *,
        token: bool = True,
        host: str | None = None,
    ) -> Answer:
        """One request. `host` None: the usual Host header; with `token` the token as Bearer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        try:
            connection.putrequest(method, path, skip_host=host is not None, skip_accept_encoding=True)
            given = {**({"Authorization": f"Bearer {self.token}"} if token else {}), **(headers or {})}
            if host:
                given["Host"] = host
            if body is not None and not {"Content-Length", "Transfer-Encoding"} & set(given):
                given["Content-Length"] = str(len(body))
            for name, value in given.items():
                connection.putheader(name, value)
            connection.endheaders(body)
            answer = connection.getresponse()
            return Answer(answer.status, {key.lower(): value for key, value in answer.getheaders()}, answer.read())
        finally:
            connection.close()

    def follow(self, run: str) -> Iterator[tuple[str, Any]]:
        """The events of a run: kind and document."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        with closing(connection):
            headers = {"Authorization": f"Bearer {self.token}"}
            connection.request("GET", f"/api/v1/runs/{run}/events", headers=headers)
            answer = connection.getresponse()
            assert answer.fp is not None
            kind = ""
            while line := answer.fp.readline().decode():
                if line.startswith("event: "):
                    kind = line[7:].strip()
                elif line.startswith("data: "):
                    yield kind, json.loads(line[6:])

    def post(self, path: str, document: Any) -> Answer:
        return self.ask(path, "POST", {"Content-Type": "application/json"}, json.dumps(document).encode())


@contextmanager
def serve(home: Path, *options: str) -> Iterator[Dashboard]:
    """A dashboard of the data folder `home` on a free port."""
    environment = {**os.environ, "MLBENCH_HOME": str(home), "OMP_NUM_THREADS": "1"}
    words = ("serve", "-o", "json", *options)
    process = start(*words, environment=environment, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        text = ""
        for line in process.stdout:
            text += line
            if line == "}\n":
                break
        document = json.loads(text)
        token = document["url"].partition("token=")[2]
        yield Dashboard(home, document["port"], token, document["url"], process.pid)
    finally:
        process.terminate()
        process.wait(PATIENCE)
