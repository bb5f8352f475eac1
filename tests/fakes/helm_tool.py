"""`helm` as far as charts are installed by it: a program with rules of its own, at work on a real API.

It keeps its releases as Secrets, as helm does. A chart's value `trouble` says what is to go wrong. Its command line is
in the file `log` beside the program, one JSON line a call.
"""

import json
import os
import signal
import ssl
import sys
import time
from base64 import b64decode
from http.client import HTTPConnection, HTTPSConnection
from pathlib import Path
from typing import Any, NoReturn

import yaml

# Says its version without the imports of the rest, since every command asks for it.
PROGRAM = """#!{python} -IS
import sys
if sys.argv[1] == "version":
    print(open(sys.argv[0].rpartition("/")[0] + "/version").read())
    sys.exit()
sys.path[:0] = {path!r}
from tests.fakes.helm_tool import main
main(sys.argv)
"""


class HelmTool:
    """The tests' side: the program in a folder for the PATH."""

    def __init__(self, folder: Path, version: str = "v3.19.5") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        program = folder / "helm"
        root = str(Path(__file__).parents[2])
        packages = [entry for entry in sys.path if entry.endswith("site-packages")]
        program.write_text(PROGRAM.format(python=sys.executable, path=[root, *packages]))
        program.chmod(0o755)
        (folder / "version").write_text(version)
        self.log = folder / "log"

    @property
    def calls(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log.read_text().splitlines()] if self.log.exists() else []


def main(argv: list[str]) -> None:
    folder, words = Path(argv[0]).parent, argv[1:]
    given = {word: following for word, following in zip(words, [*words[1:], ""], strict=True) if word.startswith("--")}
    values = json.loads(Path(given["--values"]).read_text()) if "--values" in given else {}
    files = {flag: describe(given[flag]) for flag in ("--values", "--kubeconfig") if flag in given}
    environment = sorted(key for key in os.environ if key.startswith(("HELM", "KUBE")))
    with open(folder / "log", "a") as log:
        log.write(json.dumps({"argv": words, "files": files, "values": values, "environment": environment}) + "\n")
    {"template": template, "upgrade": upgrade, "uninstall": uninstall}[words[0]](words, given, values)


def describe(path: str) -> dict[str, object]:
    return {"mode": oct(os.stat(path).st_mode & 0o777), "link": os.readlink(path) if os.path.islink(path) else path}


def fail(words: str) -> NoReturn:
    sys.exit(f"Error: {words}")


def debug(words: str) -> None:
    print(f"client.go:144: 2026-11-21 15:42:27.43 +0000 UTC m=+0.22 [debug] {words}", file=sys.stderr, flush=True)


def fail_loudly(words: str) -> NoReturn:
    """As helm does with --debug."""
    print(f"Error: {words}", file=sys.stderr)
    debug(f"{words}\nmain.newUpgradeCmd.func2\n\thelm.sh/helm/v3/cmd/helm/upgrade.go:244\nruntime.goexit")
    time.sleep(0.5)  # somebody looks at its progress before it has ended
    sys.exit(1)


def template(words: list[str], given: dict[str, str], values: dict[str, Any]) -> None:
    if values.get("trouble") == "schema":
        fail("values don't meet the specifications of the schema(s) in the following chart(s):\nweb:\n- trouble: no")
    print(yaml.safe_dump({"kind": "ConfigMap", "data": values}))


def upgrade(words: list[str], given: dict[str, str], values: dict[str, Any]) -> None:
    name, chart, space, trouble = words[2], Path(words[3]), given["--namespace"], values.get("trouble")
    api = Api(given["--kubeconfig"])
    about = yaml.safe_load((chart / "Chart.yaml").read_text())
    secrets = f"/api/v1/namespaces/{space}/secrets"
    newest = max((int(item["version"]) for item in api.releases(space, name)), default=0)
    if any(item["status"].startswith("pending") for item in api.releases(space, name)):
        fail("UPGRADE FAILED: another operation (install/upgrade/rollback) is in progress")
    label, _, value = given["--labels"].partition("=")
    labels = {label: value, "owner": "helm", "name": name, "version": str(newest + 1)}
    secret = {"metadata": {"name": f"sh.helm.release.v1.{name}.v{newest + 1}", "labels": labels}}
    labels["status"] = "pending-install"

    def become(status: str) -> None:
        body = {"metadata": {"labels": {**labels, "status": status}}}
        api.ask("PATCH", f"{secrets}/{secret['metadata']['name']}", body)

    def stop(number: int, frame: object) -> None:
        become("failed")
        fail("release web failed: context canceled")

    signal.signal(signal.SIGTERM, stop)
    api.ask("POST", secrets, secret)
    debug("creating 2 resource(s)")
    if values.get("service"):
        service = {"metadata": {"name": name}, "spec": {"type": values["service"]}}
        service["status"] = {"loadBalancer": {"ingress": [{"ip": "192.0.2.9"}]}}
        api.ask("POST", f"/api/v1/namespaces/{space}/services", service)
    if trouble in ("hang", "orphan"):
        debug("Deployment is not ready: web. 0 out of 1 expected pods are ready")
        time.sleep(60 if trouble == "hang" else 1)
    if trouble == "deadline":
        become("failed")
        waiting = {"state": {"waiting": {"reason": "ImagePullBackOff", "message": "no"}}}
        pod = {"metadata": {"name": "web-0"}, "status": {"phase": "Pending", "containerStatuses": [waiting]}}
        api.ask("POST", f"/api/v1/namespaces/{space}/pods", pod)
        fail_loudly("context deadline exceeded")
    if trouble == "fail":
        become("failed")
        fail_loudly('Deployment.apps "web" is invalid: spec.replicas: Invalid value: -1')
    become("deployed")
    print(json.dumps({"name": name, "info": {"status": "deployed", "notes": f"{name} {about['version']} is there."}}))


def uninstall(words: list[str], given: dict[str, str], values: dict[str, Any]) -> None:
    space, api = given["--namespace"], Api(given["--kubeconfig"])
    for name in words[1 : words.index("--namespace")]:
        found = api.releases(space, name)
        if not found:
            fail(f"uninstall: Release not loaded: {name}: release: not found")
        for labels in found:
            api.ask("DELETE", f"/api/v1/namespaces/{space}/secrets/sh.helm.release.v1.{name}.v{labels['version']}")
        api.ask("DELETE", f"/api/v1/namespaces/{space}/services/{name}", missing=True)


class Api:
    """As a kubeconfig says."""

    def __init__(self, path: str) -> None:
        config = json.loads(Path(path).read_text())
        cluster, self.user = config["clusters"][0]["cluster"], config["users"][0]["user"]
        self.server = cluster["server"]
        authority = cluster.get("certificate-authority-data")
        self.tls = ssl.create_default_context(cadata=b64decode(authority).decode()) if authority else None

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None, missing: bool = False) -> Any:
        headers = {"Authorization": f"Bearer {self.user.get('token')}", "Content-Type": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        host = self.server.partition("//")[2]
        connection = (
            HTTPSConnection(host, context=self.tls, timeout=60) if self.tls else HTTPConnection(host, timeout=60)
        )
        connection.request(method, path, data, headers)
        answer = connection.getresponse()
        text = answer.read()
        if answer.status < 400:
            return json.loads(text)
        if answer.status != 404 or not missing:
            fail(f"Kubernetes cluster unreachable: {text.decode()}")
        return None

    def releases(self, space: str, name: str) -> list[dict[str, str]]:
        """The labels of all revisions."""
        items = self.ask("GET", f"/api/v1/namespaces/{space}/secrets?labelSelector=owner%3Dhelm,name%3D{name}")["items"]
        return [item["metadata"]["labels"] for item in items]
