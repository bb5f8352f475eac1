"""The options of KIND clusters."""

from dataclasses import dataclass

from providers.base import option


@dataclass(frozen=True)
class KindOptions:
    """The options of `mlbench create-cluster kind`; fields are declared once, for flags, plans and the record."""

    image: str | None = option(None, "--image", help="node image; default: kind's own")
    kubernetes_version: str | None = option(
        None, "--kubernetes-version", "-k", help="Kubernetes X.Y or X.Y.Z, by the node image that kind published for it"
    )
    load: tuple[str, ...] = option(
        (), "--load", help="image of this machine's Docker to load onto every node; repeatable"
    )
    registry_port: int | None = option(
        None,
        "--registry-port",
        "--registry_port",
        "-p",
        help="run a registry on 127.0.0.1 at this port; runs pull the task images from it",
    )
    registry_name: str = option(
        "kind-registry", "--registry-name", "--registry_name", "-r", help="name of the registry's container"
    )
    registry_image: str = option("registry:3", "--registry-image", help="image of the registry")
    num_cpus: int | None = option(
        None, "--num-cpus", "-c", help="CPUs that pods may request on each node; default: all of this machine"
    )
    num_gpus: int = option(0, "--num-gpus", "-g", help="number of GPUs per worker; KIND supports none")
