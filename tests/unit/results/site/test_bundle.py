"""Files of a results site that a browser needs to judge archives."""

import base64
import hashlib
import io
import tarfile
from pathlib import Path

import pytest

from mlbench_cli import __version__
from mlbench_cli.errors import NotFoundError, UsageError
from mlbench_cli.results.site import bundle


def make_package(names: tuple[str, ...]) -> bytes:
    """A package of the npm registry: everything is below package/."""
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w:gz") as packed:
        for name in names:
            info = tarfile.TarInfo(f"package/{name}")
            info.size = len(name)
            packed.addfile(info, io.BytesIO(name.encode()))
    return target.getvalue()


def test_a_judge_is_written_into_a_new_site_and_over_an_older_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundle, "make_judge", lambda: b"zip")
    digest = hashlib.sha256(b"zip").hexdigest()
    for _ in range(2):
        judge = bundle.write_judge(tmp_path / "new" / "site")
        assert judge == (f"judges/{__version__}-{digest[:12]}.zip", digest, __version__)
        assert (tmp_path / "new" / "site" / judge.file).read_bytes() == b"zip"


def test_only_the_files_of_pyodide_that_a_page_needs_are_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = make_package((*bundle.PYODIDE_FILES, "package.json", "../evil"))
    monkeypatch.setattr(bundle, "PYODIDE_SHA512", base64.b64encode(hashlib.sha512(data).digest()).decode())
    package = tmp_path / "pyodide.tgz"
    package.write_bytes(data)
    for _ in range(2):
        bundle.unpack_pyodide(package, tmp_path / "new" / "site")
    folder = tmp_path / "new" / "site" / "pyodide"
    assert {path.name for path in folder.iterdir()} == {*bundle.PYODIDE_FILES, "NOTICE.txt"}
    assert (folder / "pyodide.mjs").read_bytes() == b"pyodide.mjs"
    assert "Mozilla Public License 2.0" in (folder / "NOTICE.txt").read_text()


def test_another_package_than_the_pinned_one_is_refused(tmp_path: Path) -> None:
    package = tmp_path / "pyodide.tgz"
    package.write_bytes(make_package(bundle.PYODIDE_FILES))
    with pytest.raises(UsageError, match="its SHA-512 is") as caught:
        bundle.unpack_pyodide(package, tmp_path / "site")
    assert caught.value.hint == f"npm pack pyodide@{bundle.PYODIDE}, then --pyodide pyodide-{bundle.PYODIDE}.tgz"
    assert not (tmp_path / "site").exists()
    with pytest.raises(NotFoundError, match="There is no file"):
        bundle.unpack_pyodide(tmp_path / "none.tgz", tmp_path / "site")
    with pytest.raises(UsageError, match="cannot be read"):
        bundle.unpack_pyodide(tmp_path, tmp_path / "site")
