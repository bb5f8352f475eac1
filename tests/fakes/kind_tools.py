"""`docker` and `kind` as far as the KIND provider calls them: two programs on a world that is one file.

Each call is a process that acts on the world by rules of its own, as the real programs do on Docker. KIND_WORLD names
the file. The programs import next to nothing, not even json, since tests start hundreds of them.
"""

from __future__ import annotations

import _json
import fcntl
import marshal
import os
import signal
import sys
import time

TYPE_CHECKING = False  # as typing's, which takes long to import
if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any, TypedDict

    class Volume(TypedDict):
        """A Docker volume, as `docker volume inspect` describes it."""

        Labels: dict[str, str]
        CreatedAt: str

    class Container(TypedDict, total=False):
        """A node of a cluster (the last four keys) or another container."""

        state: str
        port: int
        labels: dict[str, str]
        cluster: str
        files: dict[str, str]
        images: list[str]
        finished: bool

    class State(TypedDict):
        """What Docker has; `trouble` is what goes wrong and when, `log` every call, `server` each cluster's API."""

        volumes: dict[str, Volume]
        containers: dict[str, Container]
        images: dict[str, str]
        networks: dict[str, list[str]]
        log: list[str]
        trouble: dict[str, str]
        store: str
        server: str


KUBECONFIG = """apiVersion: v1
kind: Config
current-context: kind-{name}
clusters: [{{name: kind-{name}, cluster: {{server: "{server}"}}}}]
contexts: [{{name: kind-{name}, context: {{cluster: kind-{name}, user: kind-{name}}}}}]
users: [{{name: kind-{name}, user: {{token: secret-of-{name}}}}}]
"""
PROGRAM = """#!{python} -ISE
import sys
sys.path.insert(0, {folder!r})
import kind_tools
kind_tools.program()
"""
EMPTY: State = {
    "volumes": {},
    "containers": {},
    "images": {},
    "networks": {"kind": []},
    "log": [],
    "trouble": {},
    "store": "overlay2",
    "server": "https://127.0.0.1:6443",
}


class World:
    """The tests' side: a folder with both programs for the PATH, and the world to look at and to trouble."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "world"
        self.bin = folder / "bin"
        if not self.path.exists():
            self.path.write_bytes(marshal.dumps(dict(EMPTY)))
            self.bin.mkdir()
            for name in ("docker", "kind"):
                (self.bin / name).write_text(PROGRAM.format(python=sys.executable, folder=os.path.dirname(__file__)))
                (self.bin / name).chmod(0o755)

    @property
    def state(self) -> State:
        with world(self.path) as state:
            pass
        return state

    def change(self, **values: Any) -> None:
        with world(self.path) as state:
            state.update(values)  # type: ignore[typeddict-item]

    @property
    def left(self) -> list[str]:
        """What there is but images and networks."""
        state = self.state
        return sorted([*state["volumes"], *state["containers"]])


class world:
    """The state in a file, held alone while it is used."""

    def __init__(self, path: str | Path) -> None:
        self.file = open(path, "r+b")  # noqa: SIM115

    def __enter__(self) -> State:
        fcntl.flock(self.file, fcntl.LOCK_EX)
        state: State = marshal.load(self.file)
        self.state = state
        return state

    def __exit__(self, *_: object) -> None:
        self.file.seek(0)
        self.file.truncate()
        marshal.dump(dict(self.state), self.file)
        self.file.close()


class ToolError(Exception):
    pass


def as_json(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{as_json(key)}: {as_json(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(as_json, value)) + "]"
    return _json.encode_basestring_ascii(value) if isinstance(value, str) else str(value).lower()


def options(argv: list[str], *flags: str) -> tuple[dict[str, list[str]], list[str]]:
    """The values of options, and the words that are left."""
    found: dict[str, list[str]] = {}
    rest, words = [], list(argv)
    while words:
        word = words.pop(0)
        if word in flags:
            found.setdefault(word, []).append(words.pop(0))
        elif word not in ("--force", "--volumes", "--detach", "--interactive", "--all", "--quiet"):
            rest.append(word)
    return found, rest


# --- docker ---------------------------------------------------------------------------------------------------------


def docker_info(state: State, argv: list[str]) -> str:
    if "--format" in argv and os.environ.get("KIND_EXPERIMENTAL_PROVIDER") == "podman":
        raise ToolError("Error: template: info: can't evaluate field DriverStatus in type *define.Info")
    if state["trouble"].get("docker") == "down":
        raise ToolError(
            "Cannot connect to the Docker daemon at unix:///var/run/docker.sock. Is the docker daemon running?"
        )
    if "{{.CgroupVersion}}" in argv:
        return str(state["trouble"].get("cgroup", "2"))
    return (
        as_json([["driver-type", "io.containerd.snapshotter.v1"]] if state["store"] == "containerd" else []) + "20.10"
    )


def docker_volume(state: State, argv: list[str]) -> str:
    verb, argv = argv[0], argv[1:]
    given, rest = options(argv, "--label", "--filter", "--format")
    volumes = state["volumes"]
    if verb == "create":  # an existing one is left as it is, without a word
        labels = dict(label.split("=", 1) for label in given.get("--label", []))
        volumes.setdefault(rest[0], {"Labels": labels, "CreatedAt": "2026-11-01T00:00:00Z"})
        return rest[0]
    if verb == "ls":
        key, _, value = given["--filter"][0].removeprefix("label=").partition("=")
        return "\n".join(
            name for name, volume in volumes.items() if key in volume["Labels"] and value in ("", volume["Labels"][key])
        )
    if verb == "rm":
        volumes.pop(rest[0], None)
        return rest[0]
    if any(name not in volumes for name in rest):
        raise ToolError(f"[]\nError response from daemon: get {rest[0]}: no such volume")
    return as_json([volumes[name] for name in rest])


def docker_ps(state: State, argv: list[str]) -> str:
    given, _ = options(argv, "--filter", "--format")
    _, _, cluster = given["--filter"][0].removeprefix("label=").partition("=")  # empty: the nodes of all
    nodes = {name: item for name, item in state["containers"].items() if item.get("cluster")}
    found = {name: item for name, item in nodes.items() if cluster in ("", item["cluster"])}
    form = "{name}\t{state}" if "{{.State}}" in given["--format"][0] else "{name}"
    return "\n".join(form.format(name=name, state=item["state"]) for name, item in found.items())


def docker_container(state: State, argv: list[str]) -> str:
    name = argv[1]
    if name not in state["containers"]:
        raise ToolError(f"[]\nError: No such container: {name}")
    item = state["containers"][name]
    networks: dict[str, object] = {network: {} for network, names in state["networks"].items() if name in names}
    bindings = {"5000/tcp": [{"HostIp": "127.0.0.1", "HostPort": str(item["port"])}]} if "port" in item else {}
    return as_json(
        [
            {
                "State": {"Status": item["state"]},
                "HostConfig": {"PortBindings": bindings},
                "Config": {"Labels": item.get("labels", {})},
                "NetworkSettings": {"Networks": networks},
            }
        ]
    )


def docker_run(state: State, argv: list[str]) -> str:
    given, rest = options(argv, "--restart", "--publish", "--label", "--name")
    name, port = given["--name"][0], int(given["--publish"][0].split(":")[1])
    if name in state["containers"]:
        raise ToolError(f'Conflict. The container name "/{name}" is already in use')
    if rest[0] not in state["images"]:
        raise ToolError(f"Unable to find image '{rest[0]}' locally")
    labels = dict(label.split("=", 1) for label in given["--label"])
    state["containers"][name] = {"state": "running", "port": port, "labels": labels}
    return name


def docker_rm(state: State, argv: list[str]) -> str:
    _, rest = options(argv)
    for name in rest:
        state["containers"].pop(name, None)
        for names in state["networks"].values():
            if name in names:
                names.remove(name)
    return ""


def docker_network(state: State, argv: list[str]) -> str:
    _, network, name = argv
    if name in state["networks"][network]:
        raise ToolError(f"endpoint with name {name} already exists in network {network}")
    state["networks"][network].append(name)
    return ""


def docker_image(state: State, argv: list[str]) -> str:
    if argv[1] not in state["images"] and os.environ.get("KIND_EXPERIMENTAL_PROVIDER") == "podman":
        raise ToolError(f"Error: {argv[1]}: image not known")
    if argv[1] not in state["images"]:
        raise ToolError(f"[]\nError: No such image: {argv[1]}")
    return as_json([{"Id": state["images"][argv[1]], "Os": "linux", "Architecture": "amd64"}])


def docker_save(state: State, argv: list[str]) -> str:
    given, rest = options(argv, "--output", "--platform")
    if (state["store"] == "containerd") != ("--platform" in given):
        raise ToolError("unable to create manifests file: NotFound: content digest sha256:00: not found")
    with open(given["--output"][0], "w") as file:
        file.write(rest[0])
    return ""


def docker_exec(state: State, argv: list[str]) -> str:
    _, rest = options(argv)
    node = state["containers"].get(rest[0])
    if node is None:
        raise ToolError(f"Error: No such container: {rest[0]}")
    command = rest[1:]
    script = command[-1]
    if command[:3] == ["sh", "-s", "--"]:  # a real shell, without the node's tools
        import subprocess

        command[0] = "/bin/sh"
        done = subprocess.run(command, input=sys.stdin.read(), capture_output=True, text=True, env={"PATH": "/nowhere"})
        if done.returncode:
            raise ToolError(done.stderr)
        return str(done.stdout)
    if command[0] == "grep":
        if command[2] not in node["files"].get(command[3], ""):
            raise ToolError("")
        return ""
    if command[0] == "crictl":
        if script not in node["images"]:
            raise ToolError(f'no such image "{script}" present')
        return ""
    if script.startswith("mkdir"):
        node["files"][script.split("'")[-2]] = sys.stdin.read()
        return ""
    if "apply -f -" in script:
        assert "local-registry-hosting" in sys.stdin.read()
        return "configmap/local-registry-hosting created"
    if "get nodes" in script:
        if not node["finished"]:
            sys.exit(44)
        names = [name for name, item in state["containers"].items() if item.get("cluster") == node["cluster"]]
        return "\n".join(f"{name}   Ready   <none>   1s   v1.34.0" for name in names)
    assert "coredns" in script
    return "2"


# --- kind -----------------------------------------------------------------------------------------------------------


def kind_version(state: State, argv: list[str]) -> str:
    return f"kind {state['trouble'].get('version', 'v0.30.0')} go1.26 linux/amd64"


def kind_create(path: str, argv: list[str]) -> str:
    """Nodes appear one after the other, and the control plane is finished last; not one step, as with the real one."""
    given, _ = options(argv[1:], "--name", "--config", "--kubeconfig", "--image")
    name, config = given["--name"][0], sys.stdin.read()
    trouble = None
    for number in range(config.count("role:")):
        with world(path) as state:
            trouble = state["trouble"].get("kind create")
            node = f"{name}-control-plane" if number == 0 else f"{name}-worker{number if number > 1 else ''}"
            if node in state["containers"]:
                raise ToolError(f'ERROR: node(s) already exist for a cluster with the name "{name}"')
            state["containers"][node] = {
                "cluster": name,
                "state": "running",
                "files": {},
                "images": [],
                "finished": False,
            }
        if number == 0 and trouble == "kill-during":
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(0.5)  # while somebody may come to remove what there is so far
        if number == 0 and trouble in ("kill-both", "kill-both-later"):
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(1.0 if trouble == "kill-both-later" else 0.0)
            os.kill(os.getpid(), signal.SIGKILL)
    if trouble == "fail":
        kind_remove(path, name)
        raise ToolError('ERROR: failed to create cluster: failed to pull image "kindest/node": no route to host')
    with world(path) as state:
        state["containers"][f"{name}-control-plane"]["finished"] = True
        server = state["server"]
    with open(os.open(given["--kubeconfig"][0], os.O_WRONLY | os.O_CREAT, 0o600), "w") as file:
        file.write(KUBECONFIG.format(name=name, server=server))
    return ""


def kind_remove(path: str, name: str) -> None:
    with world(path) as state:
        for node in [node for node, item in state["containers"].items() if item.get("cluster") == name]:
            del state["containers"][node]


def kind_delete(state: State, argv: list[str]) -> str:
    if state["trouble"].get("kind delete") == "fail":
        raise ToolError("ERROR: failed to delete nodes: device or resource busy")
    given, _ = options(argv[1:], "--name", "--kubeconfig")
    for node in [node for node, item in state["containers"].items() if item.get("cluster") == given["--name"][0]]:
        del state["containers"][node]
    return ""


def kind_get(state: State, argv: list[str]) -> str:
    name = argv[argv.index("--name") + 1]
    if f"{name}-control-plane" not in state["containers"]:
        raise ToolError(f'ERROR: could not locate any control plane nodes for cluster named "{name}"')
    return KUBECONFIG.format(name=name, server=state["server"])


def kind_export(state: State, argv: list[str]) -> str:
    given, _ = options(argv[1:], "--name", "--kubeconfig")
    with open(given["--kubeconfig"][0], "w") as file:
        file.write(kind_get(state, ["kubeconfig", "--name", given["--name"][0]]))
    return ""


def kind_load(state: State, argv: list[str]) -> str:
    given, rest = options(argv[1:], "--name", "--nodes")
    with open(rest[0]) as file:
        image = file.read()
    for name, item in state["containers"].items():
        if item.get("cluster") == given["--name"][0] and name in given["--nodes"][0].split(","):
            item["images"] += [image, state["images"][image]]
    return ""


def main(program: str, argv: list[str]) -> str:
    path = os.environ["KIND_WORLD"]
    with world(path) as state:
        number = len(state["log"])
        state["log"].append(" ".join([program, *argv]))
        trouble = state["trouble"].get(str(number), "")
        down = state["trouble"].get("docker") == "down"
    if down and program == "docker":
        raise ToolError(
            "Cannot connect to the Docker daemon at unix:///var/run/docker.sock. Is the docker daemon running?"
        )
    if trouble == "kill-before":
        os.kill(os.getppid(), signal.SIGKILL)
        return ""
    if program not in ("kind", os.environ.get("KIND_EXPERIMENTAL_PROVIDER") or "docker"):
        raise ToolError(f"{program} is not the program that was chosen")
    function = globals()[f"{'kind' if program == 'kind' else 'docker'}_{argv[0]}"]
    if function is kind_create:
        answer: str = kind_create(path, argv[1:])
    else:
        with world(path) as state:
            answer = function(state, argv[1:])
    if trouble == "kill-after":
        os.kill(os.getppid(), signal.SIGKILL)
    return answer


def program() -> None:
    try:
        if answer := main(os.path.basename(sys.argv[0]), sys.argv[1:]):
            print(answer)
    except ToolError as refusal:
        sys.exit(str(refusal) or 1)
