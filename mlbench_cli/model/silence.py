"""Unreachable clusters: how long every engine waits for an answer."""

import time
from collections.abc import Callable

from msgspec.structs import replace

from mlbench_cli.config.settings import unreachable_timeout
from mlbench_cli.errors import CredentialError, MlbenchError, UnreachableError
from mlbench_cli.model.run import Finding, Observation
from mlbench_cli.util.text import rough_duration

UNREACHABLE = "unreachable"  # code of the finding
SHORT_SECONDS = 10.0  # shorter silences are not reported
STARTING_SECONDS = 60.0  # an API server that has just started rejects everybody until it has read its roles
PAUSE_SECONDS, MAX_PAUSE_SECONDS = 0.5, 5.0


class Silence:
    """The time since a cluster last answered. `kinds` are errors that count as no answer.

    `has_answered`: it accepted these credentials before, so a refusal may be temporary.
    """

    def __init__(self, *kinds: type[MlbenchError], has_answered: bool = False) -> None:
        self.seconds = unreachable_timeout()
        self._kinds: tuple[type[MlbenchError], ...] = (UnreachableError, *kinds)
        self._has_answered = has_answered
        self._since: float | None = None
        self._refused_since: float | None = None
        self._words = ""
        self._hint: str | None = None
        self._is_told = False

    def end(self) -> None:
        """Record that the cluster has answered."""
        self._since = self._refused_since = None
        self._has_answered, self._is_told = True, False

    def tolerate(self, error: MlbenchError, begun: float | None = None) -> None:
        """Record an attempt without an answer that started at `begun` on the monotonic clock.

        Raises `error` if it is of another kind, or if the cluster has been silent for too long.
        """
        now = time.monotonic()
        is_refusal = isinstance(error, CredentialError)
        if is_refusal:
            self._refused_since = self._refused_since or now
            if (not self._has_answered and self._since is None) or now - self._refused_since >= STARTING_SECONDS:
                raise error
        elif not isinstance(error, self._kinds):
            raise error
        else:
            self._refused_since = None
        if self._since is None:
            self._since = now if begun is None else begun
        if now - self._since >= self.seconds:
            raise error
        if not is_refusal or not self._words:
            self._words, self._hint = error.message, error.hint

    def finding(self) -> Finding | None:
        """The finding for the user; None while the cluster answers or has only just become silent."""
        if self._since is None or (silent := time.monotonic() - self._since) < min(SHORT_SECONDS, self.seconds):
            return None
        return Finding(
            UNREACHABLE,
            f"{self._words.rstrip('.')}. The run may continue there. Silent for {rough_duration(silent)}; "
            f"retrying for {rough_duration(self.seconds)} (MLBENCH_UNREACHABLE_TIMEOUT).",
            hint=self._hint,
            retryable=True,
        )

    def tell(self, report: Callable[[str], None] | None) -> None:
        """Report the finding once per silence."""
        finding = self.finding()
        if finding is not None and report is not None and not self._is_told:
            self._is_told = True
            report(finding.summary)

    def observe(self, last: Observation) -> Observation:
        """The last observation of a run whose cluster does not answer. It is no evidence that the run ended."""
        finding = self.finding()
        return replace(last, time=time.time(), ended=None, findings=() if finding is None else (finding,))

    def pause(self) -> float:
        """Seconds to the next attempt: a tenth of the silence so far, within bounds."""
        silent = 0.0 if self._since is None else time.monotonic() - self._since
        return min(max(PAUSE_SECONDS, silent / 10), MAX_PAUSE_SECONDS)
