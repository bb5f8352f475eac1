"""What a rank says of its code, its packages and its machine, against what others say."""

import hashlib
import re
import shutil
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path

import pytest

from mlbench_cli.tasks.catalog import load_catalog
from task_images import facts as environment
from task_images.facts import digest_code, gpu_driver, gpu_models, list_packages
from tests import NIGHTLY

ROOT = Path(__file__).parents[3]


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / "task_images", tmp_path / "task_images", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


# One of each shape by day: a file, and two that import another task.
SAMPLE = ["digits_resnet", "cifar10_resnet20_tensorflow", "cifar10_resnet20_ddp"]


@pytest.mark.slow
@pytest.mark.parametrize("task", sorted(load_catalog()) if NIGHTLY else SAMPLE)
def test_every_task_has_a_digest_that_its_image_has_too(task: str, tmp_path: Path) -> None:
    """An image holds what the Dockerfile copies, and nothing else of the repository."""
    for line in (ROOT / "task_images" / "Dockerfile").read_text().splitlines():
        if line.startswith("COPY "):
            *sources, target = line.split()[1:]
            for source in sources:
                place = tmp_path / target / (Path(source).name if target.endswith("/") else "")
                place.parent.mkdir(parents=True, exist_ok=True)
                whole = (ROOT / source).is_dir()
                shutil.copytree(ROOT / source, place, dirs_exist_ok=True) if whole else shutil.copy(
                    ROOT / source, place
                )
    assert digest_code(task, "powersgd", tmp_path) == digest_code(task, "powersgd")


@pytest.mark.slow
def test_the_digest_is_what_sha256sum_gives(copy: Path) -> None:
    """Of the modules that a fresh process has when it has imported the task."""
    code = "import sys, task_images.mnist.task, task_images.run\n"
    code += "print(*(module.__file__ for name, module in sys.modules.items() if name.startswith('task_images')))"
    done = subprocess.run([sys.executable, "-c", code], cwd=copy, check=True, capture_output=True, text=True)
    package = copy / "task_images"
    loaded = {Path(name).relative_to(package).as_posix() for name in done.stdout.split()}
    own = {path.relative_to(package).as_posix() for path in (package / "mnist").glob("*.*")}
    late = {f"mpi/{name}.py" for name in ("__init__", "group", "pmi")}  # with --backend mpi
    late.add("gpu.py")  # with GPUs
    late |= {"checkpoint.py", "peak.py", "speed.py", "methods/catalog.py"}
    names = loaded | own | late
    lines = subprocess.run(["sha256sum", *sorted(names)], cwd=package, capture_output=True, check=True).stdout
    assert digest_code("mnist", "", copy) == (hashlib.sha256(lines).hexdigest(), "")


def test_only_code_that_runs_changes_the_digest(copy: Path) -> None:
    before = digest_code("mnist", "", copy)
    folder = copy / "task_images" / "mnist"
    for name in (".task.py.swp", "task.py~", "task.pyc", "__pycache__/task.py"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("changed")
    with open(copy / "task_images" / "methods" / "powersgd.py", "a") as file:
        file.write("# changed\n")
    (copy / "task_images" / "wmt16_gnmt" / "bpe.py").write_text("changed")
    assert digest_code("mnist", "", copy) == before
    assert digest_code("mnist", "powersgd", copy)[0] == before[0]  # what a method adds has a digest of its own
    assert digest_code("mnist", "powersgd", copy)[1] != digest_code("mnist", "powersgd")[1]
    digests = {before}
    own = ("mnist/__init__.py", "mnist/task.py", "mnist/new.py")
    names = (*own, "train.py", "methods/base.py", "contract.py")
    for number, name in enumerate(names, 2):
        with open(copy / "task_images" / name, "a") as file:
            file.write("# changed\n")
        digests.add(digest_code("mnist", "", copy))
        assert len(digests) == number


def test_a_task_that_another_imports_counts(copy: Path) -> None:
    before = digest_code("cifar10_resnet20_ddp", "", copy)
    with open(copy / "task_images" / "cifar10_resnet20" / "data.py", "a") as file:
        file.write("# changed\n")
    assert digest_code("cifar10_resnet20_ddp", "", copy) != before


def test_packages_are_those_of_importlib() -> None:
    expected: dict[str, str] = {}
    for found in distributions():
        expected.setdefault(re.sub(r"[-_.]+", "-", found.name).lower(), found.version)
    assert list_packages() == expected
    assert "torch" in expected


def test_packages_of_every_form_are_read(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for name in ("Some_Pack.age-1.0+cpu.dist-info", "egg-2.0-py3.11.egg-info", "develop.egg-info", "empty.egg-info"):
        (first / name).mkdir(parents=True)
    (first / "develop.egg-info" / "PKG-INFO").write_text("Metadata-Version: 2.1\nVersion: 3.0\n")
    (second / "egg-9.dist-info").mkdir(parents=True)
    assert list_packages([str(first), str(tmp_path / "absent"), str(second)]) == {
        "develop": "3.0",
        "egg": "2.0",
        "empty": "unknown",
        "some-pack-age": "1.0+cpu",
    }


def test_gpus_without_a_framework(tmp_path: Path) -> None:
    """As the driver's files read on a machine with two of them."""
    for number in (1, 0):
        folder = tmp_path / "gpus" / f"0000:0{number}:00.0"
        folder.mkdir(parents=True)
        text = f"Model: \t\t NVIDIA H100 {number}\nIRQ:   \t\t 0\nGPU UUID: \t GPU-0\n"
        (folder / "information").write_text(text)
    for line in (
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Sat Aug\nGCC version: 12\n",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build  (me)\nGCC version: 12\n",
    ):
        (tmp_path / "version").write_text(line)
        assert gpu_driver(tmp_path) == "570.86.15"
    assert gpu_models(tmp_path) == ["NVIDIA H100 0", "NVIDIA H100 1"]
    assert (gpu_models(tmp_path / "absent"), gpu_driver(tmp_path / "absent")) == ([], None)


def test_amd_gpus_without_a_framework(tmp_path: Path) -> None:
    for address in ("0000:2f:00.0", "0000:05:00.0"):
        folder = tmp_path / "drivers" / "amdgpu" / address
        folder.mkdir(parents=True)
        (folder / "product_name").write_text("AMD Instinct MI300X OAM\n")
    (tmp_path / "version").write_text("6.10.5\n")
    absent = tmp_path / "absent"
    assert gpu_models(absent, tmp_path) == ["AMD Instinct MI300X OAM"] * 2
    assert gpu_driver(absent, tmp_path) == "amdgpu 6.10.5"
    assert gpu_driver(absent, absent) is None


def test_nothing_but_the_standard_library_is_needed() -> None:
    code = "import sys; from task_images import facts as e; e.machine_facts(); e.code_facts(); "
    code += "assert not {'torch', 'numpy'} & {*sys.modules}"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
    assert environment.running_task() is None
