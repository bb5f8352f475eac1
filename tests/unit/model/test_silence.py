"""How long a cluster may be silent, what is said meanwhile, and what ends the wait, on a clock of the test's own."""

import time
from collections.abc import Callable

import pytest

from mlbench_cli.agent.channel import RemoteError
from mlbench_cli.errors import CredentialError, NotFoundError, UnreachableError
from mlbench_cli.model.run import Ending, Observation
from mlbench_cli.model.silence import MAX_PAUSE_SECONDS, PAUSE_SECONDS, SHORT_SECONDS, STARTING_SECONDS, Silence

NO_ANSWER = UnreachableError("No answer.", hint="Wait.")
REFUSED = CredentialError("Rejected.", hint="Log in.")
Wait = Callable[[float], None]


@pytest.fixture
def wait(monkeypatch: pytest.MonkeyPatch) -> Wait:
    """Lets seconds pass on the clock that the silence reads. It may be silent for 100 s."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setenv("MLBENCH_UNREACHABLE_TIMEOUT", "100s")

    def let_pass(seconds: float) -> None:
        now[0] += seconds

    return let_pass


def test_a_silence_may_last_its_time_and_not_a_moment_longer(wait: Wait) -> None:
    one = Silence()
    before = one.is_broken
    one.bear(NO_ANSWER)
    assert (before, one.is_broken) == (True, False)
    wait(99.9)
    one.bear(NO_ANSWER)
    wait(0.1)
    with pytest.raises(UnreachableError):
        one.bear(NO_ANSWER)


def test_it_counts_from_the_beginning_of_the_first_attempt(wait: Wait) -> None:
    one = Silence()
    one.bear(NO_ANSWER, begun=990.0)
    wait(90)
    with pytest.raises(UnreachableError):
        one.bear(NO_ANSWER)


def test_an_answer_ends_it(wait: Wait) -> None:
    one = Silence()
    one.bear(NO_ANSWER)
    wait(99)
    one.end()
    assert one.is_broken
    assert one.finding() is None
    wait(99)
    one.bear(NO_ANSWER)


def test_only_the_kinds_that_are_named_are_silence(wait: Wait) -> None:
    with pytest.raises(RemoteError):
        Silence().bear(RemoteError("m1", "Broken pipe.", "OSError"))
    Silence(RemoteError).bear(RemoteError("m1", "Broken pipe.", "OSError"))
    with pytest.raises(NotFoundError):
        Silence(RemoteError).bear(NotFoundError("No such run."))


def test_a_refusal_counts_as_silence_only_where_the_credentials_were_accepted_before(wait: Wait) -> None:
    with pytest.raises(CredentialError):
        Silence().bear(REFUSED)
    Silence(has_answered=True).bear(REFUSED)
    answered = Silence()
    answered.end()
    answered.bear(REFUSED)
    silent = Silence()
    silent.bear(NO_ANSWER)  # an API server that starts again refuses everybody first
    silent.bear(REFUSED)


def test_refusals_are_borne_for_a_minute(wait: Wait) -> None:
    one = Silence(has_answered=True)
    one.bear(REFUSED)
    wait(STARTING_SECONDS - 0.1)
    one.bear(REFUSED)
    wait(0.1)
    with pytest.raises(CredentialError):
        one.bear(REFUSED)


def test_no_answer_between_two_refusals_begins_the_minute_again(wait: Wait) -> None:
    one = Silence(has_answered=True)
    one.bear(REFUSED)
    wait(STARTING_SECONDS - 1)
    one.bear(NO_ANSWER)
    wait(2)
    one.bear(REFUSED)


def test_a_moment_of_silence_is_not_reported(wait: Wait) -> None:
    one = Silence()
    one.bear(NO_ANSWER)
    wait(SHORT_SECONDS - 0.1)
    assert one.finding() is None
    wait(0.1)
    finding = one.finding()
    assert finding is not None
    assert (finding.code, finding.hint, finding.retryable) == ("unreachable", "Wait.", True)
    assert finding.summary.startswith("No answer. The run may continue there. Silent for 10 s; retrying for ")
    assert "(--unreachable-timeout)" in finding.summary


def test_a_refusal_does_not_replace_the_words_of_the_silence(wait: Wait) -> None:
    one = Silence()
    one.bear(NO_ANSWER)
    one.bear(REFUSED)
    wait(SHORT_SECONDS)
    finding = one.finding()
    assert finding is not None
    assert finding.summary.startswith("No answer.")


def test_it_is_told_once_for_each_silence(wait: Wait) -> None:
    one, told = Silence(), list[str]()
    one.tell(told.append)
    for _ in range(2):
        one.bear(NO_ANSWER)
        wait(SHORT_SECONDS)
        one.tell(None)  # nobody listens: not told yet
        one.tell(told.append)
        one.tell(told.append)
        one.end()
    assert len(told) == 2


def test_silence_is_no_evidence_that_a_run_has_ended(wait: Wait) -> None:
    one = Silence()
    one.bear(NO_ANSWER)
    last = Observation(1.0, (), ended=Ending.EXITED)
    assert one.observe(last).findings == ()
    wait(SHORT_SECONDS)
    seen = one.observe(last)
    assert (seen.ended, [finding.code for finding in seen.findings]) == (None, ["unreachable"])
    assert seen.time == pytest.approx(time.time(), abs=60)


@pytest.mark.parametrize(
    ("silent", "seconds"), [(0, PAUSE_SECONDS), (4, PAUSE_SECONDS), (20, 2.0), (49, 4.9), (90, MAX_PAUSE_SECONDS)]
)
def test_the_pause_grows_with_the_silence_within_bounds(wait: Wait, silent: float, seconds: float) -> None:
    one = Silence()
    assert one.pause() == PAUSE_SECONDS
    one.bear(NO_ANSWER)
    wait(silent)
    assert one.pause() == pytest.approx(seconds)
