"""A server of Weights & Biases as far as its own client asks of one: runs, rows of history, files.

Measured with wandb 0.31: GraphQL at /graphql (UpsertBucket, CreateRunFiles; anything else may be null), rows at
/files/ENTITY/PROJECT/RUN/file_stream as lines of JSON with an offset, and files by PUT to the address that the
answer of CreateRunFiles names. The key is the password of Basic authentication.
"""

import base64
import gzip
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from mlbench_cli.model.run import JsonObject

ENTITY = "me"
HISTORY = "wandb-history.jsonl"


@dataclass
class StoredRun:
    """What a client has sent of a run. `lines` are those of each streamed file by their number."""

    name: str
    fields: JsonObject = field(default_factory=dict)
    config: JsonObject = field(default_factory=dict)
    lines: dict[str, dict[int, str]] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)
    exit_code: int | None = None

    def history(self, name: str) -> list[float]:
        """The values of a metric, in the order of its rows."""
        rows = [json.loads(text) for _, text in sorted(self.lines.get(HISTORY, {}).items())]
        return [row[name] for row in rows if name in row]


class WandbServer(ThreadingHTTPServer):
    """Runs by their id. A client needs `key`; another one is refused as by the real server."""

    daemon_threads = True

    def __init__(self, key: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.key = key
        self.runs: dict[str, StoredRun] = {}
        self.lock = threading.Lock()

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that ends closes its connections; nothing has to be printed of it."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def __enter__(self) -> "WandbServer":
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()

    def answer(self, document: JsonObject) -> JsonObject:
        """The data of a GraphQL answer."""
        query, values = document["query"], document.get("variables") or {}
        if "upsertBucket" in query:
            run = self._upsert(values)
            project = {"id": "p", "name": values["project"], "entity": {"id": "e", "name": ENTITY}}
            shown = {"id": "r", "name": run.name, "displayName": run.fields.get("displayName"), "config": "{}"}
            bucket = {**shown, "description": "", "sweepName": None, "project": project, "historyLineCount": 0}
            return {"upsertBucket": {"bucket": bucket, "inserted": True}}
        if "createRunFiles" in query:
            files = [{"name": name, "uploadUrl": f"{self.url}/put/{values['run']}/{name}"} for name in values["files"]]
            return {"createRunFiles": {"runID": "r", "uploadHeaders": [], "files": files}}
        if "viewer" in query:
            return {"viewer": {"id": "u", "entity": ENTITY, "username": ENTITY, "flags": "{}", "teams": {"edges": []}}}
        return {}

    def _upsert(self, values: JsonObject) -> StoredRun:
        run = self.runs.setdefault(values["name"], StoredRun(values["name"]))
        run.fields |= {key: value for key, value in values.items() if value is not None}
        run.config |= json.loads(values.get("config") or "{}")
        return run

    def take_stream(self, name: str, document: JsonObject) -> None:
        """Rows of a run, and how it ended."""
        run = self.runs[name]
        for file, chunk in (document.get("files") or {}).items():
            lines = run.lines.setdefault(file, {})
            lines.update(enumerate(chunk["content"], chunk["offset"]))
        if document.get("complete"):
            run.exit_code = document.get("exitcode")


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else each answer takes 40 ms
    server: WandbServer

    def log_message(self, *_: object) -> None:
        pass

    def _read(self) -> bytes:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        return gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body

    def _send(self, document: object, status: int = 200) -> None:
        body = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _is_known(self) -> bool:
        expected = base64.b64encode(f"api:{self.server.key}".encode()).decode()
        return self.headers.get("Authorization") == f"Basic {expected}"

    def do_GET(self) -> None:
        self._send({})

    def do_PUT(self) -> None:
        body = self._read()
        _, _, run, name = self.path.split("/", 3)
        with self.server.lock:
            self.server.runs[run].files[name] = body
        self._send({})

    def do_POST(self) -> None:
        body = self._read()
        if self.path.startswith("/sdk/"):  # the client's measurements of itself
            self._send({})
        elif not self._is_known():
            self._send({"errors": [{"message": "user is not logged in"}]}, 401)
        elif self.path == "/graphql":
            with self.server.lock:
                self._send({"data": self.server.answer(json.loads(body))})
        else:
            with self.server.lock:
                self.server.take_stream(self.path.split("/")[4], json.loads(body))
            self._send({"exitcode": None, "limits": {}})
