"""The line about long work: silent at first, then how far it is; and what else is printed stays whole."""

import time

import pytest

from mlbench_cli import console


def test_short_work_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(console.track("Verifying", ["a", "b"])) == ["a", "b"]
    assert capsys.readouterr() == ("", "")


def test_long_work_says_in_a_pipe_what_is_done(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "PIPE_DELAY", 0.5)
    out = err = ""
    for number, item in enumerate(console.track("Verifying", ["a.zip", "b.zip", "c.zip", "d.zip"])):
        console.out(f"{item}: ok")
        while number == 2 and "2 of 4" not in err:  # however late a busy machine lets it say so
            time.sleep(0.05)
            more = capsys.readouterr()
            out, err = out + more.out, err + more.err
    out += capsys.readouterr().out
    assert out == "a.zip: ok\nb.zip: ok\nc.zip: ok\nd.zip: ok\n"
    assert "Verifying: [##########..........] 2 of 4 c.zip, " in err
    assert " left" in err


def test_a_failure_ends_the_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(console, "PIPE_DELAY", 30.0)
    with pytest.raises(ValueError, match="broken"), console.Busy("Writing") as busy:
        raise ValueError("broken")
    assert not busy._thread.is_alive()
    console.note("after")
    assert capsys.readouterr().err == "after\n"
