"""The closed vocabulary of certificates: verdicts about a cluster, states of its nodes, and reasons."""

from enum import StrEnum


class Verdict(StrEnum):
    """About the cluster."""

    ACCEPTED = "accepted"
    ACCEPTED_WITHOUT = "accepted_without"
    REJECTED = "rejected"
    CANNOT_TELL = "cannot_tell"


class State(StrEnum):
    """Of a node, worst first."""

    MISSING = "missing"
    FAILED = "failed"
    SLOW = "slow"
    WATCH = "watch"
    NOT_TESTED = "not_tested"
    OK = "ok"

    @property
    def is_bad(self) -> bool:
        """Whether the node is to be returned."""
        return self in (State.MISSING, State.FAILED, State.SLOW)


REASONS = (
    *("no_answer", "device_missing", "wrong_result", "errors_counted", "throttled", "flapping", "drift"),
    *("matmul_slow", "sustained_slow", "memory_slow", "copy_slow", "local_collective_slow", "disk_slow"),
    *("node_network_slow", "link_slow", "boundary_slow", "transport_fallback", "below_expected"),
)
