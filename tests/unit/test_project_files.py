"""What surrounds the code agrees with it: workflows, hooks, pinned versions, the changelog."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from mlbench_cli import __version__

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
REQUIREMENTS = [
    requirement
    for entries in [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
    for requirement in map(Requirement, entries)
    if requirement.name != PROJECT["name"]
]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_call_targets_of_make_and_nothing_else(path: Path) -> None:
    makefile = (ROOT / "Makefile").read_text()
    jobs = yaml.safe_load(path.read_text())["jobs"].values()
    commands = [step["run"] for job in jobs for step in job["steps"] if "run" in step]
    assert commands
    for command in commands:
        match = re.fullmatch(r"make ([a-z0-9-]+)( [A-Z_]+=\S+)*", command)
        assert match, command
        assert re.search(rf"^{match[1]}:", makefile, re.MULTILINE), f"there is no target {match[1]}"


def test_the_workflow_tests_every_python_that_the_project_names() -> None:
    test = yaml.safe_load((ROOT / ".github" / "workflows" / "test.yml").read_text())["jobs"]["test"]
    named = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
    assert test["strategy"]["matrix"]["python"] == named
    assert PROJECT["requires-python"] == f">={named[0]}"


def test_hooks_use_the_environment_and_fetch_nothing() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    assert [repository["repo"] for repository in hooks["repos"]] == ["local"]
    assert all(hook["language"] == "system" for hook in hooks["repos"][0]["hooks"])


@pytest.mark.parametrize("requirement", REQUIREMENTS, ids=str)
def test_every_dependency_has_a_floor_and_a_cap(requirement: Requirement) -> None:
    operators = {specifier.operator for specifier in requirement.specifier}
    assert {">=", "<"} <= operators


def test_pinned_versions_are_allowed_and_complete() -> None:
    """`make lock` after a change of dependencies."""
    lines = (ROOT / "requirements-ci.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if line and not line.lstrip().startswith("#")]
    versions = {canonicalize_name(pin.name): [item.version for item in pin.specifier] for pin in pins}
    assert all(len(found) == 1 for found in versions.values())
    # Of extras that CI does not install.
    unpinned = {"uv", "tensorflow-cpu", "nvidia-ml-py"}
    for requirement in REQUIREMENTS:
        name = canonicalize_name(requirement.name)
        if name not in unpinned:
            assert name in versions, f"{name} is not pinned: make lock"
            assert requirement.specifier.contains(versions[name][0]), (
                f"{name} is pinned at a version not allowed: make lock"
            )


def test_no_file_names_the_host_of_a_package_index() -> None:
    words = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    files = [path for name in listed.split("\0") if (path := ROOT / name).is_file()]
    assert len(files) > 1000
    hosts = re.compile(
        rb"py" + rb"pi\.org|pythonhosted|download\.pytorch|npm" + rb"js\.org|proxy\.golang", re.IGNORECASE
    )
    text = [path for path in files if path.suffix not in (".pyc", ".png", ".zip", ".gz")]
    assert not [
        str(path.relative_to(ROOT)) for path in text if path != Path(__file__) and hosts.search(path.read_bytes())
    ]


def test_the_changelog_has_this_version_and_what_is_unreleased() -> None:
    titles = re.findall(r"^## \[([^\]]+)\]", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    assert titles[0] == "Unreleased"
    assert __version__ in titles


def test_folders_of_tests_are_folders_of_the_source() -> None:
    folders = [
        (kind, module.parent.relative_to(ROOT / "tests" / kind))
        for kind in ("unit", "contract")
        for module in (ROOT / "tests" / kind).rglob("test_*.py")
    ]
    assert len(set(folders)) > 40
    assert [
        f"tests/{kind}/{folder}"
        for kind, folder in sorted(set(folders))
        if not (ROOT / "mlbench_cli" / folder).is_dir() and not (ROOT / folder).is_dir()
    ] == []


def test_each_bug_of_the_bank_still_applies_and_names_tests_that_exist() -> None:
    useless = []
    for diff in (ROOT / "tests" / "bugs").glob("*.diff"):
        _, header, *_ = diff.read_text("utf-8").splitlines()
        for file, _, test in (name.partition("::") for name in header.removeprefix("Tests: ").split()):
            if not (ROOT / file).exists() or (test and f"def {test}(" not in (ROOT / file).read_text("utf-8")):
                useless.append(f"{diff.name}: there is no {file}::{test}")
        done = subprocess.run(["git", "apply", "--check", str(diff)], cwd=ROOT, capture_output=True, text=True)
        useless += [f"{diff.name}: {done.stderr}"] if done.returncode else []
    assert useless == []
