"""What a supervisor writes of a rank in state.json. Standard library only: a supervisor imports this."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:  # `typing` would cost the supervisor a tenth of its start
    from typing import TypedDict

    class RankFacts(TypedDict):
        """One rank. Times are seconds since 1970; `exit_code` and `signal` are None until its process has ended."""

        rank: int
        pid: int | None
        phase: str  # model.Phase
        exit_code: int | None
        signal: int | None
        started: float | None
        finished: float | None
        stopped: bool  # ended because the supervisor was ending the run
        out_of_memory: str | None  # "cgroup" or "machine": whose count of memory kills rose
        start_error: str | None
        peak_rss_bytes: int | None  # of its largest process
        memory_limit_bytes: int | None  # of this control group or machine, if memory ran out


def pending_facts(rank: int) -> RankFacts:
    """Of a rank that has not been started."""
    return {
        "rank": rank,
        "pid": None,
        "phase": "pending",
        "exit_code": None,
        "signal": None,
        "started": None,
        "finished": None,
        "stopped": False,
        "out_of_memory": None,
        "start_error": None,
        "peak_rss_bytes": None,
        "memory_limit_bytes": None,
    }
