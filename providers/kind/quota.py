"""What this machine has and allows: node images, ports, inotify instances. Read-only."""

import socket
from pathlib import Path

from mlbench_cli.errors import UsageError
from providers.kind.api import inspect
from providers.kind.options import KindOptions
from providers.kind.resources import count_running_nodes
from providers.pins import find_pin, pinned_versions

INOTIFY_LIMIT = Path("/proc/sys/fs/inotify/max_user_instances")
INOTIFY_INSTANCES = 512  # recommended by kind; three nodes exhaust the usual 128


def image_of(options: KindOptions) -> str | None:
    """The requested node image; None for kind's default."""
    if options.image or options.kubernetes_version is None:
        return options.image
    version = options.kubernetes_version.removeprefix("v")
    parts = version.split(".")
    if not all(part.isdecimal() for part in parts) or len(parts) not in (2, 3):
        raise UsageError(f'--kubernetes-version "{options.kubernetes_version}" is not of the form X.Y or X.Y.Z.')
    pinned = find_pin("kind", "node", version)
    if len(parts) == 2 and pinned is None:
        raise UsageError(
            f"It is not known which node image kind published for Kubernetes {version}; known are "
            f"{', '.join(pinned_versions('kind'))}.",
            hint="Use a version X.Y.Z, or pass the node image with --image: https://github.com/kubernetes-sigs/kind/releases",
        )
    return pinned or f"kindest/node:v{version}"


def check_registry(options: KindOptions) -> None:
    """Reject a port that is used by something other than the registry."""
    if inspect("container", options.registry_name) is not None:
        return  # the life-cycle checks whether it matches
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", options.registry_port or 0))
        except OSError as error:
            raise UsageError(
                f"The registry cannot listen on 127.0.0.1:{options.registry_port}: {error.strerror}.",
                hint="Choose another --registry-port.",
            ) from None


def list_warnings(options: KindOptions, nodes: int) -> list[str]:
    warnings = ["Timings on KIND are meaningless, because all nodes share this machine."]
    image = image_of(options)
    if image is not None and inspect("image", image) is None:
        warnings.append(f"The node image {image} is not on this machine and will be pulled.")
    if options.registry_port is not None and inspect("image", options.registry_image) is None:
        warnings.append(f"The registry's image {options.registry_image} is not on this machine and will be pulled.")
    if INOTIFY_LIMIT.exists() and int(INOTIFY_LIMIT.read_text()) < INOTIFY_INSTANCES:
        running = count_running_nodes()
        if nodes + running > 3:
            beside = f" beside {running} of other clusters" if running else ""
            warnings.append(
                f"{nodes} nodes{beside} may run out of inotify instances on this machine and not become ready: "
                f"sudo sysctl fs.inotify.max_user_instances={INOTIFY_INSTANCES}"
            )
    return warnings
