"""Everything of a release that needs no network: `make release-rehearsal`.

    python -m tools.rehearse_release [--kind]

1. with --kind: make a KIND cluster with a registry on this machine, build one task's image and push it there
2. write commit and digests into the package, build wheel and source distribution, check both
3. sign them with a key made for that, and verify the signatures
4. install the wheel from an index on this machine into a new environment; its dependencies come from this environment
5. with the installed command, from another folder: version, the demo, its archive verified, a site built of it
6. with --kind: run on the cluster, by which the wheel's digests are pulled from the registry

Prints a line with the seconds of each step. Needs the extras "dist" and "local"; --kind needs Docker and kind. Where
nothing can be pulled, NODE_IMAGE, REGISTRY_IMAGE and BASE name images that are there.
"""

import argparse
import http.server
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from mlbench_cli import __version__
from mlbench_cli.util.commit import find_commit
from tools import check_dist, release

ROOT = Path(__file__).parents[1]
SIGNER = "release@example.org"
TASK, CLUSTER, PORT = "digits_resnet", "rehearsal-2", 5055


class Failed(Exception):
    """A step did not do what it must."""


@contextmanager
def step(name: str) -> Iterator[None]:
    """Time a step, and say so."""
    begun = time.monotonic()
    yield
    print(f"{time.monotonic() - begun:7.1f} s  {name}", flush=True)


def call(*words: object, cwd: Path = ROOT, **variables: str) -> str:
    """Standard output of a command that must succeed. Raises Failed with the end of what it wrote."""
    done = subprocess.run(
        [str(word) for word in words],
        cwd=cwd,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise Failed(
            f"{' '.join(map(str, words))} ended with {done.returncode}:\n{(done.stdout + done.stderr)[-2000:]}"
        )
    return done.stdout


def build(dist: Path, images: Path | None) -> tuple[Path, Path]:
    """Wheel and source distribution, with what the release says of itself."""
    release.write_release(find_commit(ROOT / "mlbench_cli"), images)
    try:
        call(sys.executable, "-m", "build", "--no-isolation", "--outdir", dist)
        if problems := check_dist.check_folder(dist):
            raise Failed("\n".join(problems))
    finally:
        release.clean()
    (wheel,), (sdist,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    return wheel, sdist


def sign(files: Sequence[Path], folder: Path) -> None:
    """Sign files with a new key, verify them, and see that a changed one is refused."""
    call("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / "key")
    signers = folder / "allowed_signers"
    signers.write_text(f"{SIGNER} {(folder / 'key.pub').read_text()}")
    for file in files:
        call("ssh-keygen", "-q", "-Y", "sign", "-n", "file", "-f", folder / "key", file)
        if not is_signed(file.read_bytes(), file, signers):
            raise Failed(f"the signature of {file.name} does not verify")
        if is_signed(file.read_bytes() + b"x", file, signers):
            raise Failed(f"the signature of {file.name} verifies for another file")


def is_signed(data: bytes, file: Path, signers: Path) -> bool:
    """Whether ssh-keygen accepts the signature beside a file for these bytes."""
    words = ("ssh-keygen", "-Y", "verify", "-f", signers, "-I", SIGNER, "-n", "file", "-s", f"{file}.sig")
    return subprocess.run(words, input=data, capture_output=True, check=False).returncode == 0


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    """Serves files without a line per request."""

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def serve_index(wheel: Path, folder: Path) -> Iterator[str]:
    """The address of a package index that has this wheel alone."""
    project = folder / "simple" / "mlbench-cli"
    project.mkdir(parents=True)
    shutil.copy(wheel, project)
    (project / "index.html").write_text(f'<!DOCTYPE html><a href="{wheel.name}">{wheel.name}</a>\n')
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(QuietHandler, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/simple"
    server.shutdown()
    server.server_close()


def install(wheel: Path, folder: Path) -> Path:
    """The command `mlbench` of a new environment that has the wheel; other packages are this environment's."""
    environment = folder / "environment"
    call(sys.executable, "-m", "venv", environment)
    with serve_index(wheel, folder / "index") as address:
        call(
            environment / "bin/python", "-m", "pip", "install", "--quiet", "--no-deps", "--no-cache-dir",
            "--index-url", address, f"mlbench-cli=={__version__}",
        )  # fmt: skip
    (packages,) = environment.glob("lib/python*/site-packages")
    # Behind the environment's own packages, and without this environment's .pth files, one of which names the checkout.
    here = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "rest.pth").write_text("".join(f"{path}\n" for path in here))
    return environment / "bin/mlbench"


def use(mlbench: Path, folder: Path) -> None:
    """The demo, from a folder that is not the checkout."""
    work = folder / "work"
    work.mkdir()
    home = str(folder / "home")
    commit = find_commit(ROOT / "mlbench_cli")[:12]
    said = call(mlbench, "--version", cwd=work)
    if said.strip() != f"mlbench {__version__} ({commit})":
        raise Failed(f"mlbench --version says {said!r}, not {__version__} ({commit})")
    place = call(mlbench.parent / "python", "-c", "import mlbench_cli; print(mlbench_cli.__file__)", cwd=work).strip()
    if not place.startswith(str(folder)):
        raise Failed(f"the command is not the installed one: {place}")
    call(mlbench, "run", "demo", "1", "--task", TASK, "--preset", "tiny", "--yes", cwd=work, MLBENCH_HOME=home)
    call(mlbench, "download", "demo-1", "--to", "demo.zip", cwd=work, MLBENCH_HOME=home)
    call(mlbench, "verify", "demo.zip", cwd=work, MLBENCH_HOME=home)
    call(mlbench, "site", "demo.zip", "--to", "site", cwd=work, MLBENCH_HOME=home)


def push(folder: Path) -> Path:
    """Make the cluster and its registry, and push an image there; the file with registry and digests."""
    options = {"--image": "NODE_IMAGE", "--registry-image": "REGISTRY_IMAGE"}
    more = [word for option, name in options.items() if name in os.environ for word in (option, os.environ[name])]
    home = str(folder / "home")
    mlbench = Path(sys.executable).parent / "mlbench"
    call(mlbench, "create-cluster", "kind", "2", "rehearsal", "--registry-port", PORT, *more, MLBENCH_HOME=home)
    base = ["--base", os.environ["BASE"]] if os.environ.get("BASE") else []
    words = ("images", "push", TASK, "--registry", f"localhost:{PORT}", *base, "-o", "json")
    file = folder / "images.json"
    file.write_text(call(mlbench, *words, MLBENCH_HOME=home))
    return file


def run_on_cluster(mlbench: Path, folder: Path, images: Path) -> None:
    """A run whose image is the one that the wheel names, by digest."""
    home, work = str(folder / "home"), folder / "work"
    call(
        *(mlbench, "run", "cluster", "2", "--task", TASK, "--preset", "tiny", "--cluster", CLUSTER, "--yes"),
        *("--timeout", "10m"),
        cwd=work,
        MLBENCH_HOME=home,
    )
    (digest,) = json.loads(images.read_text())["digests"].values()
    call(mlbench, "download", "cluster-2", "--to", "cluster.zip", cwd=work, MLBENCH_HOME=home)
    call("unzip", "-q", "cluster.zip", "result.json", cwd=work)
    found = {state["image_digest"] for state in json.loads((work / "result.json").read_text())["worker_states"]}
    if not all(digest in str(each) for each in found):
        raise Failed(f"the workers ran {found}, not {digest}")


def main(argv: list[str]) -> int:
    """1 if a step fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", action="store_true", help="also push an image and run on a KIND cluster")
    given = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        images = None
        try:
            if given.kind:
                with step("KIND cluster with a registry; image built and pushed"):
                    images = push(folder)
            with step("wheel and source distribution built and checked"):
                files = build(folder / "dist", images)
            with step("signed with a local key; a changed file is refused"):
                sign(files, folder)
            with step("installed from a local index"):
                mlbench = install(files[0], folder)
            with step("demo run, verified and shown by the installed command"):
                use(mlbench, folder)
            if images is not None:
                with step("run on KIND with the image that the wheel names by digest"):
                    run_on_cluster(mlbench, folder, images)
        except Failed as error:
            print(f"release rehearsal: {error}", file=sys.stderr)
            return 1
        finally:
            if given.kind:
                cleaner = [str(Path(sys.executable).parent / "mlbench"), "delete-cluster", "kind", CLUSTER, "--yes"]
                subprocess.run(cleaner, env={**os.environ, "MLBENCH_HOME": str(folder / "home")}, check=False)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
