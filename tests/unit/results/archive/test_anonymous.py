"""Archives without what they tell of their authors, whose figures still follow from their evidence."""

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.errors import DamagedArchive
from mlbench_cli.results.archive import sample_blocks
from mlbench_cli.results.archive.anonymous import anonymize
from mlbench_cli.results.archive.pack import pack
from mlbench_cli.results.archive.reader import Archive
from mlbench_cli.results.archive.reseal import seal_anew, write_anonymous
from mlbench_cli.results.archive.verify import verify
from mlbench_cli.results.site.entries import find_disclosed
from tests.unit.results.runs import START, sealed_run

PACKAGES = {"torch": "2.15.0", "numpy": "2.4.6", "secret-project": "0.1", "nvidia-nccl-cu13": "2.30"}
PROVENANCE = {
    "mlbench": None,
    "python": "3.11.7",
    "command_line": ["mlbench", "run", "--data-dir", "/home/jane/data"],
    "packages": PACKAGES,
}


def a_run(folder: Path, **changes: Any) -> Path:
    from mlbench_cli import __version__

    environment = {"host": "this-host", "packages": PACKAGES, "note": "log in /home/jane/logs on this-host"}
    return sealed_run(
        folder,
        name="run-2",
        task="mnist",
        environment=environment,
        data_dir="/home/jane/data",
        provenance={**PROVENANCE, "mlbench": __version__},
        **changes,
    )


def test_nothing_of_the_author_is_left_and_every_figure_stays(tmp_path: Path) -> None:
    source, target = a_run(tmp_path / "run"), tmp_path / "run.zip"
    with Archive.open(source) as before:
        assert {*find_disclosed(before)} == {"host names", "command line", "packages"}
        figures = {name: dict(before.result)[name] for name in ("official_line", "task_seconds", "timings", "outcome")}
        assert find_disclosed(before)["host names"] == ("this-host",)
    write_anonymous(source, target)
    assert verify(target).ok
    assert verify(source).ok
    with Archive.open(target) as after:
        assert {name: dict(after.result)[name] for name in figures} == figures
        assert find_disclosed(after) == {
            "host names": ("node-0",),
            "packages": ("numpy", "nvidia-nccl-cu13", "torch"),
        }
    with zipfile.ZipFile(target) as packed:
        everything = b"".join(packed.read(name) for name in packed.namelist())
    for word in (b"this-host", b"jane", b"secret-project", b"--data-dir"):
        assert word not in everything, word


def test_an_anonymous_run_is_sealed_as_its_anonymous_copy_would_be(tmp_path: Path) -> None:
    sealed = a_run(tmp_path / "run", anonymous=True)
    assert verify(sealed).ok
    everything = b"".join(path.read_bytes() for path in sealed.rglob("*") if path.is_file())
    for word in (b"this-host", b"jane", b"secret-project", b"--data-dir"):
        assert word not in everything, word
    pack(sealed, tmp_path / "run.zip")
    write_anonymous(sealed, tmp_path / "copy.zip")
    assert (tmp_path / "copy.zip").read_bytes() == (tmp_path / "run.zip").read_bytes()


def test_sizes_of_logs_in_samples_are_those_of_the_changed_logs(tmp_path: Path) -> None:
    """A log that got shorter would contradict the size that it had while the run went on."""
    whole = (a_run(tmp_path / "first") / "logs/rank-0.log").read_bytes()
    line = whole.index(b"\n", whole.index(b'"environment"')) + 1
    sizes = (5, line - 20, line, line + 30, len(whole))
    samples = [{"time": START + second, "rank": 0, "log_bytes": size} for second, size in enumerate(sizes)]
    source = a_run(tmp_path / "run", samples=samples)
    write_anonymous(source, tmp_path / "run.zip")
    with Archive.open(source) as before, Archive.open(tmp_path / "run.zip") as after:
        assert [found["code"] for found in after.findings] == [found["code"] for found in before.findings]
        assert after.result["division"] == before.result["division"]
        log = after.read("logs/rank-0.log", 1 << 20)
        rows = [row["log_bytes"] for row in sample_blocks.expand(map(dict, after.samples()))]
    end = log.index(b"\n", log.index(b'"environment"')) + 1
    assert len(log) < len(whole)
    assert (rows[0], rows[2:]) == (5, [end, end + 30, len(log)])
    assert 5 < rows[1] <= end


def test_the_plan_of_hosts_keeps_no_path_of_python(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "run")
    (folder / "manifests").mkdir(exist_ok=True)
    (folder / "manifests" / "plan.json").write_text('{\n  "python": "/opt/acme/.venv/bin/python",\n  "nodes": 2\n}\n')
    anonymize(folder)
    assert json.loads((folder / "manifests" / "plan.json").read_text()) == {"python": "python", "nodes": 2}


def test_the_job_of_slurm_keeps_no_folder_but_those_of_the_system(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "run")
    (folder / "manifests").mkdir(exist_ok=True)
    job = folder / "manifests" / "job.sh"
    job.write_text(
        "#!/bin/bash\n#SBATCH --output=/acme/shared/runs/17/out\nrun=/acme/shared/runs/17\n"
        'mkdir "$run/started" || exit 75\nexport PATH=${PATH:-/usr/local/bin:/usr/bin:/bin}\n'
        'source /acme/env/bin/activate\nsrun -- /bin/sh -c \'exec "$@"\' "$run" /acme/env/bin/python -I run\n'
    )
    anonymize(folder)
    text = job.read_text()
    assert "acme" not in text
    for kept in ("#!/bin/bash", "run=17", '"$run/started"', "/usr/local/bin:/usr/bin:/bin", "/bin/sh -c", "python -I"):
        assert kept in text


def test_a_damaged_archive_is_refused(tmp_path: Path) -> None:
    source = a_run(tmp_path / "run")
    (source / "logs/rank-0.log").write_text("nothing\n")
    with pytest.raises(DamagedArchive):
        write_anonymous(source, tmp_path / "run.zip")
    assert not (tmp_path / "run.zip").exists()


def test_sealing_an_unchanged_archive_again_gives_the_same_bytes(tmp_path: Path) -> None:
    write_anonymous(a_run(tmp_path / "run"), tmp_path / "run.zip")
    before = (tmp_path / "run.zip").read_bytes()
    with Archive.open(tmp_path / "run.zip") as archive:
        seal_anew(archive, tmp_path / "again.zip", lambda _: None)
    assert (tmp_path / "again.zip").read_bytes() == before
