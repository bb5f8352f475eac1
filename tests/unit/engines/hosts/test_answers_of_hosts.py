"""What hosts and their files may hold: comments in environment files, logins that never stop printing, odd answers."""

from pathlib import Path

import pytest

from mlbench_cli.agent.channel import Channel, Target, explain_failure
from mlbench_cli.engines.hosts.hostfile import parse_environment
from mlbench_cli.errors import CredentialError, UnreachableError, UsageError


def test_comments_of_an_environment_file_are_no_values() -> None:
    text = "export OMP_NUM_THREADS=4  # per rank\nA='x # y' # z\nB=a#b\n# C=1\n"
    assert parse_environment(text) == {"OMP_NUM_THREADS": "4", "A": "x # y", "B": "a#b"}


@pytest.mark.parametrize("script", ["exec yes", "echo hello; sleep 60", "printf '0 0 0\\n'; sleep 60"])
def test_a_host_that_answers_anything_else_is_unreachable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str
) -> None:
    (tmp_path / "ssh").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(UnreachableError):
        Channel(Target("m1")).call("hello", seconds=3.0)


@pytest.mark.parametrize("is_old", [False, True])
def test_a_persons_session_settings_do_not_reach_the_transport(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_old: bool
) -> None:
    refuse = 'case " $* " in *SessionType*) echo "Bad configuration option: sessiontype" >&2; exit 255 ;; esac\n'
    (tmp_path / "ssh").write_text(f"#!/bin/sh\n{refuse if is_old else ''}")
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    words = Target("m1", "python3", "/etc/my config").command()
    for option in ("RemoteCommand=none", "ClearAllForwardings=yes", "PermitLocalCommand=no"):
        assert option in words
    for option in ("SessionType=default", "StdinNull=no", "ForkAfterAuthentication=no"):  # since OpenSSH 8.7
        assert (option in words) is not is_old


@pytest.mark.parametrize(
    ("code", "text", "kind"),
    [
        (255, "Can't open user config file cfg_rel: No such file or directory", UsageError),
        (127, "sh: 1: exec: python3: not found", UsageError),
        (255, "No ED25519 host key is known for m1. Host key verification failed.", CredentialError),
    ],
)
def test_whose_message_it_is_is_decided_by_who_exited(code: int, text: str, kind: type[Exception]) -> None:
    error = explain_failure(Target("m1", "python3", "/etc/my config"), "no answer", code, text)
    assert type(error) is kind
    if kind is not UsageError:
        assert "ssh -F '/etc/my config' m1 true" in str(error.hint)
