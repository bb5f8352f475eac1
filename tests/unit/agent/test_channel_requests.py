"""What a channel writes to the process at its other end, and what it makes of the answers, without a process."""

import pytest

from mlbench_cli.agent.channel import Target, explain_failure

# --- requests -------------------------------------------------------------------------------------------------------


# --- no answer ------------------------------------------------------------------------------------------------------


# --- the end --------------------------------------------------------------------------------------------------------


# --- machines -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "code", "hint"),
    [
        (
            "Host key verification failed.",
            255,
            "Compare the key with the machine's owner; then ssh m1 true asks whether to accept it.",
        ),
        (
            "IDENTIFICATION HAS CHANGED",
            1,
            "Compare the key with the machine's owner; then ssh m1 true asks whether to accept it.",
        ),
        ("python9: not found", 127, "Name a Python 3.10 or later there: --python"),
        ("python9: not executable", 126, "Name a Python 3.10 or later there: --python"),
        ("python9: not found", 125, "Try: ssh m1 true"),
        ("Permission denied", 1, "Try: ssh m1 true"),
        ("", 128, "Try: ssh m1 true"),
    ],
)
def test_each_failure_says_what_to_do(text: str, code: int, hint: str) -> None:
    assert explain_failure(Target("m1"), "no answer", code, text).hint == hint
