"""Whether each cloud's extra is enough alone: `pip install '.[gke]'` and `'.[eks]'`, each into a fresh environment.

In each the other cloud's library must be absent, `mlbench doctor` must name it with the command that adds it, and the
cloud's own provider must describe, plan for and refuse a cluster without it. Takes minutes and a package index; not
part of the tests.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
# The extra, its library's package, and the other one's, which must not be there.
EXTRAS = {"gke": ("google-cloud-container", "boto3"), "eks": ("boto3", "google-cloud-container")}
OTHER = {"gke": "eks", "eks": "gke"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("extras", nargs="*", default=list(EXTRAS), help="default: gke eks")
    given = parser.parse_args()
    failed = 0
    for extra in given.extras:
        with tempfile.TemporaryDirectory() as folder:
            for what, trouble in check_extra(extra, Path(folder)):
                print(f"[{extra}] {what}: {trouble or 'ok'}", flush=True)
                failed += bool(trouble)
    return 1 if failed else 0


def check_extra(extra: str, folder: Path) -> "list[tuple[str, str]]":
    """What was looked at, and what is wrong with it."""
    python = folder / "venv" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True)
    install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", f"{ROOT}[{extra}]"]
    installed = subprocess.run(install, capture_output=True, text=True, check=False)
    if installed.returncode:
        return [("pip install", installed.stderr.strip()[-500:])]
    mine, others = EXTRAS[extra]
    listed = subprocess.run([str(python), "-m", "pip", "list", "--format", "json"], capture_output=True, check=True)
    packages = {item["name"].lower(): item["version"] for item in json.loads(listed.stdout)}
    found = [
        ("pip install", ""),
        (f"{mine} {packages.get(mine)}", "" if mine in packages else "it is not there"),
        (f"without {others}", f"{others} {packages[others]} came along" if others in packages else ""),
    ]
    environment = {**_clean(), "MLBENCH_HOME": str(folder / "home")}
    for words, code, says in (
        (["--version"], 0, "mlbench"),
        (["list-clusters"], 0, "local"),
        (["create-cluster", extra, "--help"], 0, "--machine-type"),
        (["create-cluster", extra, "2", "Bad"], 2, "not a DNS label"),
        (["doctor", extra], 3 if extra == "gke" else 2, f"{extra} library"),  # as far as its credentials or region
        (["doctor", OTHER[extra]], 2, f"pip install 'mlbench-cli[{OTHER[extra]}]'"),
    ):
        done = subprocess.run(
            [str(python), "-m", "mlbench_cli", *words], env=environment, cwd=folder, capture_output=True, text=True
        )
        said = done.stdout + done.stderr
        right = done.returncode == code and says in said and "Traceback" not in said
        found.append((f"mlbench {' '.join(words)}", "" if right else f"exit code {done.returncode}: {said[-500:]}"))
    return found


def _clean() -> dict[str, str]:
    """No credentials, no region, and nothing of this environment's packages."""
    kept = {key: value for key, value in os.environ.items() if key in ("PATH", "HOME", "LANG", "TMPDIR")}
    none = {"AWS_CONFIG_FILE": "/dev/null", "AWS_SHARED_CREDENTIALS_FILE": "/dev/null"}
    none |= {"AWS_EC2_METADATA_DISABLED": "true", "NO_GCE_CHECK": "true"}
    return {**kept, **none, "CLOUDSDK_CONFIG": "/nonexistent", "NO_COLOR": "1"}


if __name__ == "__main__":
    sys.exit(main())
