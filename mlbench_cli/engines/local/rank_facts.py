"""What a supervisor writes of a rank in state.json. Standard library only: a supervisor imports this."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:  # `typing` would cost the supervisor a tenth of its start
    from typing import Any


def pending_facts(rank: int) -> dict[str, Any]:
    """Of a rank that has not been started."""
    return {
        "rank": rank,
        "pid": None,
        "phase": "pending",
        "exit_code": None,
        "signal": None,
        "started": None,
        "finished": None,
        "stopped": False,  # ended because the supervisor was ending the run
        "out_of_memory": None,  # "cgroup" or "machine": whose count of memory kills rose
        "start_error": None,
    }
