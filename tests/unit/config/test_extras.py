"""Hints that name a package of mlbench name the right distribution, an extra that exists, and a command that works."""

import json
import re
import sys
import tomllib
from pathlib import Path

import pytest

from mlbench_cli.config.extras import DISTRIBUTION, find_requirement, install_hint

ROOT = Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
TEXTS = sorted(
    path
    for folder in ("mlbench_cli", "providers", "templates", "task_images", "benchmarks", "tests", "docs", "tools")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in (".py", ".md", ".yaml", ".j2", ".sh", ".toml")
) + sorted(ROOT.glob("*.md"))


def test_the_distribution_has_the_name_that_hints_give() -> None:
    assert PROJECT["name"] == DISTRIBUTION


def test_what_pip_installed_from_a_checkout_gets_its_extras_from_there(tmp_path: Path) -> None:
    """README installs from a checkout, and hints named a package that is on no index."""
    record = tmp_path / "site" / "mlbench_cli-4.0.0.dist-info" / "direct_url.json"
    record.parent.mkdir(parents=True)
    checkout = tmp_path / "checkout"
    record.write_text(json.dumps({"dir_info": {}, "url": f"file://{checkout}"}))
    assert find_requirement(tmp_path / "site", "gke") == "CHECKOUT[gke]"  # deleted after the installation
    checkout.mkdir()
    (checkout / "pyproject.toml").touch()
    assert find_requirement(tmp_path / "site", "gke") == f"{checkout}[gke]"
    record.write_text(json.dumps({"archive_info": {}, "url": f"file://{checkout}/mlbench_cli.whl"}))
    assert find_requirement(tmp_path / "site", "gke") == f"mlbench-cli[gke] @ file://{checkout}/mlbench_cli.whl"
    record.write_text(json.dumps({"vcs_info": {"vcs": "git"}, "url": "https://example.org/m.git"}))
    assert find_requirement(tmp_path / "site", "gke") == "mlbench-cli[gke] @ git+https://example.org/m.git"


def test_extras_that_include_other_extras_name_this_distribution() -> None:
    entries = [entry for entries in PROJECT["optional-dependencies"].values() for entry in entries]
    included = [entry for entry in entries if entry.startswith("mlbench")]
    assert included
    assert all(entry.startswith(f"{DISTRIBUTION}[") for entry in included)


@pytest.mark.parametrize(
    ("receipt", "command"),
    [
        (None, f"pip install '{ROOT}[gke]'"),
        ("uv-receipt.toml", f"uv tool install '{ROOT}[gke]'"),
        ("pipx_metadata.json", f"pipx install --force '{ROOT}[gke]'"),
    ],
)
def test_a_hint_names_the_installer_of_this_environment(
    receipt: str | None, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if receipt:
        (tmp_path / receipt).touch()
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    assert install_hint("gke") == command


def test_every_hint_names_an_extra_that_exists() -> None:
    pattern = rf"install_hint\(['\"](\w+)['\"]|load_library\([^)]*?, ['\"](\w+)['\"]|{DISTRIBUTION}\[(\w+)"
    found = (extra for path in TEXTS for groups in re.findall(pattern, path.read_text("utf-8")) for extra in groups)
    named = {*filter(None, found)}
    assert {"gke", "eks", "plots"} <= named <= {*PROJECT["optional-dependencies"]}


def test_no_text_names_the_distribution_of_a_stranger() -> None:
    """The index has another project under the name "mlbench"."""
    stranger = re.compile(r"(?:install|inject) (?:--?\w+ )*['\"]?mlbench(?![\w-])|(?<![\w/-])" + r"mlbench\[\w")
    found = [f"{path.relative_to(ROOT)}: {match[0]}" for path in TEXTS for match in stranger.finditer(path.read_text())]
    assert not found
