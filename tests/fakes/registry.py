"""A container registry on 127.0.0.1, and a `docker` that builds nothing and pushes to it.

The registry follows the rules of the OCI distribution specification that matter here: repositories that have to exist
(as ECR's), logins by basic authentication or by a token for a scope, tags of an immutable registry.
"""

import base64
import hashlib
import json
import stat
import sys
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

# Pushes by HTTP, with the login of the configuration that it was given, and logs every call with its environment.
DOCKER = """#!{python} -IS
import base64, hashlib, json, os, sys, urllib.error, urllib.request
words = sys.argv[1:]
def value(flag):
    return words[words.index(flag) + 1] if flag in words else None
with open({log!r}, "a") as log:
    print(json.dumps({{"words": words, "buildkit": os.environ.get("DOCKER_BUILDKIT"),
                       "config": os.environ.get("DOCKER_CONFIG")}}), file=log)
if words[:2] == ["buildx", "build"] and not {buildx}:
    sys.exit("docker: unknown command: docker buildx")
name = words[1] if words[0] == "push" else value("--tag")
if "build" in words:
    assert os.path.isfile(value("--file")), "no Dockerfile"
    own = {{"Dockerfile", "pyproject.toml", "catalog.json"}} & {{*os.listdir(words[-1])}}
    assert own or os.listdir(words[-1]) == ["task_images"], "the context holds something else"
if words[0] == "push" or "--push" in words:
    host, _, path = name.partition("/")
    repository, _, tag = path.rpartition(":")
    config = os.path.join(os.environ.get("DOCKER_CONFIG", "/nowhere"), "config.json")
    auths = json.load(open(config))["auths"] if os.path.exists(config) else {{}}
    headers = {{"Authorization": "Basic " + auths[host]["auth"]}} if host in auths else {{}}
    base = os.environ["MLBENCH_REGISTRY_ENDPOINT"]
    def ask(method, path, data=None):
        request = urllib.request.Request(base + path, data=data, headers=headers, method=method)
        try:
            with urllib.request.urlopen(request) as answer:
                return answer.headers
        except urllib.error.HTTPError as error:
            if method == "HEAD":  # its answer has no words: the next request is refused with some
                return None
            sys.exit(error.read().decode())
    # A layer, as the OCI distribution specification has it pushed, then the manifest.
    layer = name.encode()
    digest = "sha256:" + hashlib.sha256(layer).hexdigest()
    if ask("HEAD", "/v2/" + repository + "/blobs/" + digest) is None:
        place = ask("POST", "/v2/" + repository + "/blobs/uploads/", b"")["Location"]
        place = ask("PATCH", place, layer)["Location"]
        ask("PUT", place + "?digest=" + digest, b"")
    ask("PUT", "/v2/" + repository + "/manifests/" + tag, name.encode())
"""


@dataclass
class RegistryWorld:
    """What the registry holds: digests by repository and tag."""

    manifests: dict[str, dict[str, str]] = field(default_factory=dict)
    users: dict[str, str] = field(default_factory=dict)  # empty: anybody may read and write
    repositories: set[str] | None = None  # those that were made; None: a push makes them
    immutable: bool = False
    with_token: bool = False  # logins by a token of the registry's own server
    platforms: dict[str, list[str]] = field(default_factory=dict)  # of a repository's images; none: no such document
    log: list[str] = field(default_factory=list)


class FakeRegistry:
    def __init__(self) -> None:
        self.world = RegistryWorld()
        registry = self

        class Handler(_Handler):
            owner = registry

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    owner: FakeRegistry

    def do_GET(self) -> None:
        world = self.owner.world
        world.log.append(f"{self.command} {self.path}")
        if self.path.startswith("/token"):
            self._answer(200, json.dumps({"token": "granted"}).encode() if self._is_known() else b"{}")
            return
        if not self._is_allowed() and not self.path.endswith("?signed"):
            kind = f'Bearer realm="{self.owner.url}/token",service="x",scope="pull"' if world.with_token else "Basic"
            self._refuse(401, "UNAUTHORIZED", "authentication required", {"Www-Authenticate": kind})
            return
        _, _, rest = self.path.partition("/v2/")
        if self.command == "GET" and "/blobs/" in rest:
            self._serve_configuration(rest.partition("/blobs/")[0])
            return
        if "/blobs/" in rest:
            self._serve_blob(*rest.split("/blobs/"))
            return
        repository, _, tag = rest.partition("/manifests/")
        if self.command == "PUT":
            self._put(repository, tag)
            return
        found = world.manifests.get(repository, {})
        digest = tag if tag in found.values() else found.get(tag)
        if digest is None:
            code = "MANIFEST_UNKNOWN" if found else "NAME_UNKNOWN"
            self._refuse(404, code, "manifest unknown" if found else "repository name not known to registry")
            return
        self._answer(200, self._manifest(repository), {"Docker-Content-Digest": digest})

    def _manifest(self, repository: str) -> bytes:
        """An index for several platforms, else the manifest of an image, whose configuration is a blob."""
        platforms = self.owner.world.platforms.get(repository, [])
        if len(platforms) == 1:
            return json.dumps({"config": {"digest": "sha256:c0"}}).encode()
        split = [dict(zip(("os", "architecture"), name.split("/"), strict=True)) for name in platforms]
        return json.dumps({"manifests": [{"platform": item} for item in split]} if split else {}).encode()

    def _serve_configuration(self, repository: str) -> None:
        """By way of a storage service, as ECR and Artifact Registry do, which refuses a second login."""
        system, _, architecture = self.owner.world.platforms[repository][0].partition("/")
        if "?signed" not in self.path:
            self._answer(307, b"", {"Location": f"{self.owner.url}{self.path}?signed"})
        elif "Authorization" in self.headers:
            self._answer(400, b"Only one auth mechanism allowed")
        else:
            self._answer(200, json.dumps({"os": system, "architecture": architecture}).encode())

    do_PUT = do_HEAD = do_POST = do_PATCH = do_GET

    def _serve_blob(self, repository: str, rest: str) -> None:
        """Layers: none is ever there before it is uploaded, and their bytes are not kept."""
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.command == "HEAD":
            self._answer(404, b"")
        elif not self._refuse_unknown(repository):
            place = f"/v2/{repository}/blobs/uploads/1"
            self._answer(201 if self.command == "PUT" else 202, b"", {"Location": place})

    def _refuse_unknown(self, repository: str) -> bool:
        world = self.owner.world
        if world.repositories is None or repository in world.repositories:
            return False
        said = f"The repository with name '{repository}' does not exist in the registry with id '123456789012'"
        self._answer(404, f"name unknown: {said}".encode())
        return True

    def _put(self, repository: str, tag: str) -> None:
        world = self.owner.world
        content = self.rfile.read(int(self.headers["Content-Length"]))
        if self._refuse_unknown(repository):
            return
        tags = world.manifests.setdefault(repository, {})
        if world.immutable and tag in tags:
            said = f"The image tag '{tag}' already exists in the '{repository}' repository"
            self._answer(
                400, f"tag invalid: {said} and cannot be overwritten because the repository is immutable.".encode()
            )
            return
        tags[tag] = f"sha256:{hashlib.sha256(content).hexdigest()}"
        self._answer(201, b"")

    def _is_allowed(self) -> bool:
        if not self.owner.world.users or self.headers.get("Authorization") == "Bearer granted":
            return True
        return not self.owner.world.with_token and self._is_known()

    def _is_known(self) -> bool:
        given = self.headers.get("Authorization", "")
        try:
            user, _, password = base64.b64decode(given.removeprefix("Basic ")).decode().partition(":")
        except ValueError:
            return False
        return not self.owner.world.users or self.owner.world.users.get(user) == password

    def _refuse(self, status: int, code: str, message: str, headers: dict[str, str] | None = None) -> None:
        self._answer(status, json.dumps({"errors": [{"code": code, "message": message}]}).encode(), headers)

    def _answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@dataclass(frozen=True)
class DockerCall:
    """One call of `docker`: its arguments, and DOCKER_BUILDKIT and DOCKER_CONFIG as it saw them."""

    words: list[str]
    buildkit: str | None
    config: str | None


class FakeDocker:
    """A folder for the PATH with a `docker` in it, and the log of its calls."""

    def __init__(self, folder: Path, *, buildx: bool = True) -> None:
        folder.mkdir(parents=True)
        self.folder = folder
        self._log = folder / "log"
        program = folder / "docker"
        program.write_text(DOCKER.format(python=sys.executable, log=str(self._log), buildx=buildx))
        program.chmod(program.stat().st_mode | stat.S_IXUSR)

    @property
    def calls(self) -> list[DockerCall]:
        lines = self._log.read_text().splitlines() if self._log.exists() else []
        return [DockerCall(**json.loads(line)) for line in lines]
