"""The official Kubernetes client, loaded only by commands that talk to a cluster, because it takes 0.3 s."""

from typing import Any

from mlbench_cli.config.extras import install_hint
from mlbench_cli.errors import UsageError


def import_official_client() -> Any:
    """The module `kubernetes.client`. Raises UsageError if it is not installed."""
    try:
        import kubernetes.client
    except ImportError as error:
        raise UsageError(
            f"Kubernetes clusters need packages that are not installed: {error}.", hint=install_hint("k8s")
        ) from None
    return kubernetes.client
