"""Why a connection failed, from ssh's own words, as OpenSSH 9.2 wrote them."""

import os
import sys
from contextlib import closing
from pathlib import Path

import pytest

from mlbench_cli.agent.channel import Channel, Target, check_login, explain_failure
from mlbench_cli.errors import CredentialError, MlbenchError, UnreachableError, UsageError

CHANGED = """@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@
@    WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!     @
@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@
Host key verification failed.
"""
NEW_HOST = """No ED25519 host key is known for [m1]:2222 and you have requested strict checking.
Host key verification failed.
"""
BAD_OPTION = "cfg: line 1: Bad configuration option: bogus\ncfg: terminating, 1 bad configuration options\n"
FORWARD, KEY = (
    "channel 0: open failed: connect failed: No route to host",
    'Load key "/home/me/.ssh/id": bad permissions',
)
JUMP = "ssh: Could not resolve hostname jump: Name or service not known"


@pytest.mark.parametrize(
    ("text", "code", "kind", "words"),
    [
        (CHANGED, 255, CredentialError, "The host key of m1 has changed: Host key verification failed."),
        (NEW_HOST, 255, CredentialError, "The host key of m1 is unknown on this machine"),
        ("Host key is known to differ, so\nHost key verification failed.", 255, CredentialError, "was not accepted"),
        ("No answer.\nHost key verification failed.", 255, CredentialError, "was not accepted"),
        ("me@m1: Permission denied (publickey).", 255, CredentialError, "m1 refuses the login: me@m1: Permission"),
        (f"{KEY}\nme@m1: Permission denied (publickey).", 255, CredentialError, f"(publickey). ({KEY})"),
        ("Received disconnect from 10.0.0.1 port 22:2: Too many authentication failures\n"
         "Disconnected from 10.0.0.1 port 22", 255, CredentialError, "Too many authentication failures"),
        ("Too many authentication failures\nConnection reset by 10.0.0.1 port 22", 255, CredentialError,
         "login: Too many"),
        ("Access denied by pam_slurm_adopt: you have no active jobs on this node\n"
         "Connection closed by 10.0.0.1 port 22", 255, CredentialError, "login: Access denied by pam_slurm_adopt"),
        ("Bad owner or permissions on /home/me/.ssh/config", 255, UsageError, "configuration: Bad owner"),
        ("Can't open user config file /gone: No such file or directory", 255, UsageError, "configuration: Can't open"),
        ("ControlPath too long ('/home/me/.ssh/sockets/x' >= 108 bytes)", 255, UsageError, "ControlPath too long"),
        ('unix_listener: path "/x/cm" too long for Unix domain socket', 255, UsageError, "too long for Unix"),
        ("cfg line 2: keyword hostname extra arguments at end of line", 255, UsageError, "keyword hostname extra"),
        ('cfg line 5: no argument after keyword "port"', 255, UsageError, "no argument after keyword"),
        ("/home/me/.bashrc: line 5: fortune: command not found\nclient_loop: Broken pipe", 255, UnreachableError, ""),
        (BAD_OPTION, 255, UsageError, "configuration: cfg: line 1: Bad configuration option: bogus"),
        ("it is Python 3.6", 126, UsageError, "python3 cannot be run: it is Python 3.6"),
        ("sh: 1: python9: Permission denied", 126, UsageError, "cannot be run: sh: 1: python9: Permission denied"),
        ("bash: line 1: exec: python9: not found", 127, UsageError, "On m1, python3 cannot be run: bash: line 1"),
        ("ssh: connect to host m1 port 22: Connection refused", 255, UnreachableError, "not answer: ssh: connect"),
        (f"{JUMP}\nkex_exchange_identification: Connection closed by remote host", 255, UnreachableError, JUMP),
        (f"{FORWARD}\nstdio forwarding failed\nConnection closed by UNKNOWN port 9", 255, UnreachableError, FORWARD),
        ("Connection closed by UNKNOWN port 65535", 255, UnreachableError, "not answer: Connection closed by UNKNOWN"),
        ("@@@@\n", None, UnreachableError, "m1 does not answer: no answer"),
        ("", None, UnreachableError, "m1 does not answer: no answer"),
    ],
)  # fmt: skip
def test_each_kind_of_failure_has_its_error(text: str, code: int | None, kind: type[MlbenchError], words: str) -> None:
    error = explain_failure(Target("m1"), "no answer", code, text)
    assert type(error) is kind
    assert words in error.message
    assert error.hint


@pytest.mark.parametrize("login", ["", "-oProxyCommand=id", "-F", "-Fx", "-", "a b", "m1;id", "$(id)", "m1\n"])
def test_a_login_cannot_be_an_option_or_a_command(login: str) -> None:
    with pytest.raises(UsageError):
        check_login(login)


@pytest.mark.parametrize("login", ["m1", "me@m-1.example.org", "[::1]", "fe80::1%eth0", "a"])
def test_a_login_may_be_any_name_or_address(login: str) -> None:
    assert check_login(login) == login


def test_host_keys_are_always_checked_and_nothing_is_asked() -> None:
    words = Target("me@m1", ssh_config="/x").command()
    assert words[:3] == ["ssh", "-F", "/x"]
    assert {"StrictHostKeyChecking=yes", "BatchMode=yes"} <= set(words)
    assert words[-3:-1] == ["--", "me@m1"]


def test_a_host_key_that_has_changed_is_removed_where_ssh_found_it() -> None:
    """Its entry is that of an address, a port or an alias, not of the name that was given."""
    text = CHANGED.replace("Host key", "Offending ECDSA key in /home/me/.ssh/known_hosts:7\nHost key")
    hint = str(explain_failure(Target("m1"), "no answer", 255, text).hint)
    assert "sed -i 7d /home/me/.ssh/known_hosts" in hint


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (
            "printf 'me@m1: Permission denied (\\377 publickey).\\n' >&2; exit 255",
            "me@m1 refuses the login: me@m1: Permission denied (\ufffd publickey).",
        ),
        # Of nologin(8), on standard output.
        ("echo 'This account is currently not available.'; exit 1", "me@m1 does not answer: This account is currently"),
    ],
)
def test_what_was_written_before_the_end_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, words: str
) -> None:
    ssh = tmp_path / "ssh"
    ssh.write_text(f"#!/bin/sh\n{script}\n")
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    channel = Channel(Target("me@m1"))
    with pytest.raises(MlbenchError) as caught:
        channel.call("anything")
    assert words in caught.value.message


def test_a_connection_that_a_jump_host_drops_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenSSH's own words for it, with a ProxyJump."""
    lines = "kex_exchange_identification: Connection closed by remote host\nConnection closed by UNKNOWN port 65535"
    (tmp_path / "ssh").write_text(
        f"""#!/bin/sh
case " $* " in *" -V "*) exit 0 ;; esac
echo x >>{tmp_path}/tried
if [ $(wc -l <{tmp_path}/tried) -lt 3 ]; then echo '{lines}' >&2; exit 255; fi
for word; do command=$word; done
exec sh -c "$command"
"""
    )
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with closing(Channel(Target("m1", sys.executable))) as channel:
        assert channel.call("hello")["writable"]
    assert len((tmp_path / "tried").read_text().splitlines()) == 3


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


def test_a_request_may_be_bounded_by_the_silence_before_its_answer() -> None:
    channel = Channel(Target(None, sys.executable))
    with pytest.raises(UnreachableError, match="no answer in time"):
        channel.exchange("run", argv=["sleep", "3"], quiet_seconds=0.5)
    assert channel.exchange("run", argv=["sleep", "1"])[0]["code"] == 0
    channel.close()


@pytest.mark.nightly
def test_a_request_that_may_take_long_is_waited_for_all_of_its_time() -> None:
    """Commands of a controller that is down take up to 45 s, and probes of hosts two minutes."""
    channel = Channel(Target(None, sys.executable))
    assert channel.call("run", argv=["sleep", "42"], timeout=60, seconds=65)["code"] == 0
    channel.close()
