"""--pin: on which clusters ranks can be bound to CPUs of their own, and how many of them."""

from mlbench_cli.errors import UsageError
from mlbench_cli.model.run import Cluster
from mlbench_cli.model.spec import RunSpec


def check_pinning(spec: RunSpec, cluster: Cluster, cores: int | None) -> None:
    """Refuse --pin if somebody else starts the ranks, or if this machine has fewer usable cores (None: not known here)
    than processes. Raises UsageError."""
    if not spec.pin:
        return
    if cluster.provider not in ("local", "hosts"):
        raise UsageError(
            f"--pin works on this machine and hosts; {cluster.provider} binds ranks itself.",
            hint="Leave it out.",
        )
    if cores is not None and spec.process_count > cores:
        raise UsageError(
            f"--pin: {spec.process_count} processes need one CPU each, but this machine has {cores}.",
            hint="Use fewer workers, or remove --pin.",
        )
