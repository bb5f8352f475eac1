"""Whose an archive is: real keys, real ssh-keygen, through the command line."""

import os
import shutil
import stat
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from mlbench_cli.app import run
from mlbench_cli.results.archive.files import digest, format_sums, pack, parse_sums
from mlbench_cli.storage.run_folder import SIGNATURE, SUMS
from tests.contract import clients
from tests.contract.clients import answer

Captured = pytest.CaptureFixture[str]
SIGNER = "me@example.org"


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sealed folder of a run."""
    home = tmp_path_factory.mktemp("home")
    words = ("run", "demo", "1", "--command", "echo done", "--yes")
    clients.finish(*words, environment={**os.environ, "MLBENCH_HOME": str(home)}).check_returncode()
    [folder] = (home / "runs").iterdir()
    return folder


@pytest.fixture(autouse=True)
def place(archive: Path, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("SSH_AUTH_SOCK", "SSH_ASKPASS", "DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    new_key("key")
    allow(SIGNER, "key")
    shutil.copytree(archive, "demo")
    pack(Path("demo"), Path("demo.zip"))
    return tmp_path


def new_key(name: str, *words: str, passphrase: str = "") -> None:
    kind = () if "-t" in words else ("-t", "ed25519")
    subprocess.run(["ssh-keygen", "-q", *kind, *words, "-N", passphrase, "-C", name, "-f", name], check=True)


def allow(principal: str, key: str, options: str = "", file: str = "signers") -> None:
    with open(file, "a") as lines:
        lines.write(f"{principal} {options} {Path(f'{key}.pub').read_text()}")


def run_refused(capsys: Captured, code: int, *words: str) -> str:
    """What a command that must fail says."""
    capsys.readouterr()
    assert run(words) == code, capsys.readouterr().err
    out, err = capsys.readouterr()
    assert "Traceback" not in out + err
    assert "Next: " in out + err
    return out + err


# --- what is proven ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["demo", "demo.zip"])
def test_a_signature_proves_the_origin(capsys: Captured, name: str) -> None:
    assert run(["verify", name]) == 0
    assert capsys.readouterr().out == f"{name}: ok (integrity, derivation)\n"
    assert run(["verify", name, "--sign", "key"]) == 0
    assert run(["verify", name, "--signers", "signers"]) == 0
    out = capsys.readouterr().out
    assert f"{name}: ok (integrity, derivation, origin: {SIGNER}, ED25519 SHA256:" in out
    [document] = answer(capsys, "verify", name, "--signers", "signers")["archives"]
    assert document["proven"] == ["integrity", "derivation", "origin"]
    assert document["signer"]["principal"] == SIGNER


@pytest.mark.slow
@pytest.mark.parametrize("kind", [("-t", "ecdsa"), ("-t", "rsa", "-b", "2048"), ("-t", "rsa", "-m", "PEM")])
def test_every_kind_of_key_that_ssh_has(capsys: Captured, kind: tuple[str, ...]) -> None:
    new_key("other", *kind)
    allow("other", "other")
    assert run(["verify", "demo.zip", "--sign", "other"]) == 0
    assert run(["verify", "demo.zip", "--signers", "signers"]) == 0
    assert "origin: other" in capsys.readouterr().out


def test_a_signature_travels_with_the_archive() -> None:
    assert run(["verify", "demo", "--sign", "key"]) == 0
    pack(Path("demo"), Path("packed.zip"))
    assert run(["verify", "demo.zip", "--sign", "key"]) == 0
    assert Path("packed.zip").read_bytes() == Path("demo.zip").read_bytes()
    assert zipfile.ZipFile("demo.zip").testzip() is None
    shutil.unpack_archive("demo.zip", "unpacked")
    assert run(["verify", "unpacked", "--signers", "signers"]) == 0
    assert subprocess.run(["sha256sum", "--quiet", "-c", SUMS], cwd="unpacked", check=False).returncode == 0


def test_git_s_file_of_signers_and_its_options() -> None:
    assert run(["verify", "demo.zip", "--sign", "key"]) == 0
    Path("signers").write_text("# who may\n\n")
    new_key("other")
    allow("other@example.org", "other")
    allow(f"*@example.org,!bad@example.org,{SIGNER}", "key", 'namespaces="git,mlbench-archive",valid-after="20200101"')
    assert run(["verify", "demo.zip", "--signers", "signers"]) == 0


def test_an_agent_may_hold_the_key(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    new_key("locked", passphrase="correct horse")
    said = run_refused(capsys, 3, "verify", "demo.zip", "--sign", "locked")
    assert "could not be unlocked" in said
    assert "ssh-add locked" in said
    agent = subprocess.Popen(["ssh-agent", "-D", "-a", "agent"], stdout=subprocess.DEVNULL)
    try:
        while not Path("agent").exists():
            assert agent.poll() is None
        monkeypatch.setenv("SSH_AUTH_SOCK", str(Path("agent").absolute()))
        script = Path("askpass")
        script.write_text("#!/bin/sh\necho correct horse\n")
        script.chmod(stat.S_IRWXU)
        environment = {**os.environ, "SSH_ASKPASS": str(script.absolute()), "SSH_ASKPASS_REQUIRE": "force"}
        subprocess.run(["ssh-add", "-q", "locked"], env=environment, check=True)
        Path("locked").unlink()
        assert run(["verify", "demo.zip", "--sign", "locked.pub"]) == 0
    finally:
        agent.terminate()
        agent.wait()
    allow("agent", "locked")
    assert run(["verify", "demo.zip", "--signers", "signers"]) == 0


# --- what is not proven -----------------------------------------------------------------------------------------------


def test_no_signature_proves_no_origin(capsys: Captured) -> None:
    said = run_refused(capsys, 3, "verify", "demo.zip", "--signers", "signers")
    assert "demo.zip: origin not proven (integrity, derivation)" in said
    assert "it has no signature" in said
    assert "mlbench verify demo.zip --sign KEY" in said


@pytest.mark.parametrize(
    ("options", "problem", "words"),
    [
        (None, "unknown_signer", "does not list the signing key"),
        ('valid-before="20200101"', "expired", "valid-before 2020-01-01"),
        ('valid-after="20900101"', "expired", "valid-after 2090-01-01"),
        ('namespaces="git"', "namespace", 'namespaces="git,mlbench-archive"'),
    ],
)
def test_a_signer_who_may_not_sign(capsys: Captured, options: str | None, problem: str, words: str) -> None:
    assert run(["verify", "demo.zip", "--sign", "key"]) == 0
    new_key("other")
    if options is None:
        allow(SIGNER, "other", file="strict")
    else:
        allow(SIGNER, "key", options, file="strict")
    assert words in run_refused(capsys, 3, "verify", "demo.zip", "--signers", "strict")
    [document] = answer(capsys, "verify", "demo.zip", "--signers", "strict", code=3)["archives"]
    assert (document["ok"], document["origin_problem"], document["proven"]) == (
        False,
        problem,
        ["integrity", "derivation"],
    )


def test_what_was_signed_cannot_be_changed_and_sealed_again(capsys: Captured) -> None:
    """Right checksums, right derivation, another archive: only the signature tells."""
    assert run(["verify", "demo", "--sign", "key"]) == 0
    Path("demo/output").mkdir(exist_ok=True)
    Path("demo/output/forged").write_text("forged")
    sums = parse_sums(Path(f"demo/{SUMS}").read_bytes(), "demo")
    with open("demo/output/forged", "rb") as file:
        sums["output/forged"] = digest(file)
    Path(f"demo/{SUMS}").write_bytes(format_sums(sums))
    assert run(["verify", "demo"]) == 0
    assert "SHA256SUMS is not what was signed" in run_refused(capsys, 3, "verify", "demo", "--signers", "signers")


def test_a_damaged_archive_has_no_origin(capsys: Captured) -> None:
    assert run(["verify", "demo", "--sign", "key"]) == 0
    Path("demo/logs/rank-0.log").write_text("forged\n")
    capsys.readouterr()
    assert run(["verify", "demo", "--signers", "signers"]) == 2
    assert "origin" not in capsys.readouterr().out
    assert run(["verify", "demo", "demo.zip", "--signers", "signers"]) == 2  # although the second lacks a signature
    said = run_refused(capsys, 2, "verify", "demo", "--sign", "key", "--force")
    assert "it is not what was sealed" in said


@pytest.mark.parametrize("text", ["", "nonsense", "-----BEGIN SSH SIGNATURE-----\nAAAA\n-----END SSH SIGNATURE-----\n"])
def test_what_is_no_signature_is_a_problem_without_signers_too(capsys: Captured, text: str) -> None:
    Path(f"demo/{SIGNATURE}").write_text(text)
    assert run(["verify", "demo"]) == 2
    assert "it is not an OpenSSH signature" in capsys.readouterr().out


def test_a_signature_for_another_purpose_is_none(capsys: Captured) -> None:
    shutil.copy(f"demo/{SUMS}", "sums")
    subprocess.run(["ssh-keygen", "-Y", "sign", "-f", "key", "-n", "git", "sums"], check=True, capture_output=True)
    shutil.copy("sums.sig", f"demo/{SIGNATURE}")
    assert run(["verify", "demo"]) == 2
    assert "for another namespace" in capsys.readouterr().out


def test_every_flipped_byte_of_a_signature_is_found(capsys: Captured) -> None:
    assert run(["verify", "demo", "--sign", "key"]) == 0
    path = Path(f"demo/{SIGNATURE}")
    whole = path.read_bytes()
    for position in range(0, len(whole), 7):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
        assert run(["verify", "demo", "--signers", "signers"]) in (2, 3), position


def test_a_second_signature_must_be_wanted(capsys: Captured) -> None:
    assert run(["verify", "demo.zip", "--sign", "key"]) == 0
    before = Path("demo.zip").read_bytes()
    assert "already signed" in run_refused(capsys, 2, "verify", "demo.zip", "--sign", "key")
    assert Path("demo.zip").read_bytes() == before
    new_key("other")
    assert run(["verify", "demo.zip", "--sign", "other", "--force"]) == 0
    assert "does not list the signing key" in run_refused(capsys, 3, "verify", "demo.zip", "--signers", "signers")


# --- what cannot be used ----------------------------------------------------------------------------------------------


def test_keys_that_cannot_sign(capsys: Captured) -> None:
    before = Path("demo.zip").read_bytes()
    assert "no key absent" in run_refused(capsys, 4, "verify", "demo.zip", "--sign", "absent")
    Path("garbage").write_text("garbage")
    Path("garbage").chmod(0o600)
    assert "cannot sign" in run_refused(capsys, 2, "verify", "demo.zip", "--sign", "garbage")
    Path("key").rename("elsewhere")
    assert "no agent has the private one" in run_refused(capsys, 3, "verify", "demo.zip", "--sign", "key.pub")
    Path("elsewhere").chmod(0o644)
    assert "chmod 600 elsewhere" in run_refused(capsys, 3, "verify", "demo.zip", "--sign", "elsewhere")
    assert Path("demo.zip").read_bytes() == before


def test_files_that_are_no_signers(capsys: Captured) -> None:
    assert run(["verify", "demo.zip", "--sign", "key"]) == 0
    for name, text, code in (("garbage", "garbage\n", 2), ("options", f"{SIGNER} odd=1 ssh-ed25519 AAAA\n", 2)):
        Path(name).write_text(text)
        assert "is not a signers file" in run_refused(capsys, code, "verify", "demo.zip", "--signers", name)
    Path("empty").touch()
    assert "does not list" in run_refused(capsys, 3, "verify", "demo.zip", "--signers", "empty")
    for name in ("absent", "."):
        assert "signers file" in run_refused(capsys, 4, "verify", "demo.zip", "--signers", name)


def test_without_ssh_keygen_the_error_says_what_to_install(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    for words in (["verify", "demo.zip", "--sign", "key"], ["verify", "demo.zip", "--signers", "signers"]):
        assert "openssh-client" in run_refused(capsys, 2, *words)
    assert run(["verify", "demo.zip"]) == 0


def test_an_ssh_keygen_that_does_not_answer_is_given_up(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch, place: Path
) -> None:
    (place / "bin").mkdir()
    (place / "bin" / "ssh-keygen").write_text("#!/bin/sh\nexec sleep 600\n")
    (place / "bin" / "ssh-keygen").chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", f"{place / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setattr("mlbench_cli.results.archive.sign.SIGN_SECONDS", 0.2)
    assert "has not answered within 0.2 s" in run_refused(capsys, 124, "verify", "demo.zip", "--sign", "key")


def test_a_passphrase_is_not_read_from_standard_input() -> None:
    new_key("locked", passphrase="correct horse")
    done = subprocess.run(
        [sys.executable, "-m", "mlbench_cli", "verify", "demo.zip", "--sign", "locked"],
        input="correct horse\n",
        capture_output=True,
        text=True,
        start_new_session=True,
        check=False,
    )
    assert done.returncode == 3
    assert "could not be unlocked" in done.stderr


def test_an_ssh_keygen_that_fails_proves_nothing_whatever_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = shutil.which("ssh-keygen")
    assert run(["verify", "demo", "--sign", "key"]) == 0
    assert run(["verify", "demo", "--signers", "signers"]) == 0
    program = tmp_path / "bin" / "ssh-keygen"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\n{real} "$@"\ncode=$?\n[ "$2" = verify ] && exit 255\nexit $code\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    assert run(["verify", "demo", "--signers", "signers"]) != 0
