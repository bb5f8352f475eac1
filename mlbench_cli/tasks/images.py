"""Image names: from a registry and a task to the reference that a run pulls.

A registry is a prefix such as "ghcr.io/me", for images "ghcr.io/me/TASK:VERSION". With a trailing ":", it is a single
repository with one tag per task, e.g. "123456789012.dkr.ecr.eu-west-1.amazonaws.com/mlbench-test-4:", because ECR
repositories must exist before a push. A release names its own images by digest. Without either, tasks run in PyTorch's
public image (`runs.launch`): what it runs is the code that the run brings.
"""

import json
from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

# For images that are built here and loaded onto nodes; "localhost" is no registry, so nothing is pulled.
LOCAL_REGISTRY = "localhost/mlbench"
# Registry and digests of a release's images. `python -m tools.release` writes it before the wheel is built.
RELEASED = Path(__file__).with_name("released.json")


class ImageReference(Struct, frozen=True):
    """One image: the registry's host ("" for none), the repository on it, and a tag or a digest."""

    host: str
    repository: str
    tag: str
    digest: str = ""

    @property
    def name(self) -> str:
        """The reference for Docker and Kubernetes."""
        base = f"{self.host}/{self.repository}" if self.host else self.repository
        return f"{base}@{self.digest}" if self.digest else f"{base}:{self.tag}"


def name_image(registry: str, image: str, version: str, digests: Mapping[str, str] | None = None) -> str:
    """The reference of a task's image in a registry: by digest if it is in `digests` (keys "IMAGE:VERSION")."""
    registry = registry.rstrip("/")
    if registry.endswith(":"):
        base, tagged = registry.removesuffix(":"), f"{registry}{image}-{version}"
    else:
        base, tagged = f"{registry}/{image}", f"{registry}/{image}:{version}"
    digest = (digests or {}).get(f"{image}:{version}")
    return f"{base}@{digest}" if digest else tagged


def name_released_image(image: str, version: str, released: Path | None = None) -> str | None:
    """The reference by digest of an image published with this release; None in a checkout."""
    try:
        document = json.loads((released or RELEASED).read_bytes())
    except FileNotFoundError:
        return None
    digests = document["digests"]
    return name_image(document["registry"], image, version, digests) if f"{image}:{version}" in digests else None


def parse_image(name: str) -> ImageReference:
    """Parse a reference. A first part with "." or ":", or "localhost", is the host; otherwise it is an image of Docker
    Hub."""
    rest, _, digest = name.partition("@")
    first, slash, path = rest.partition("/")
    if not slash or not ("." in first or ":" in first or first == "localhost"):
        first, path = "", rest
    repository, colon, tag = path.rpartition(":")
    if not colon:
        repository, tag = path, "latest"
    return ImageReference(first, repository, tag, digest)
