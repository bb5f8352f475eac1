"""Data that arrive by one command, for all 13 tasks: `mlbench data prepare` against a server with the official paths.

The double's files are small, so the tables' sizes and digests are replaced by those of the double.
"""

import bz2
import gzip
import hashlib
import io
import json
import os
import struct
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mlbench_cli.app import run
from mlbench_cli.commands import data
from mlbench_cli.tasks.catalog import load_catalog
from task_images import prepare
from task_images.bert_pretraining.texts import SPECIAL
from task_images.cifar10_resnet20.data import BINARY
from task_images.contract import Contract, TaskError
from task_images.fetch import Archive
from task_images.imagenet_resnet.folders import OFFICIAL as IMAGENET
from task_images.mnist.data import ARCHIVES as MNIST
from task_images.public import load_validation
from task_images.published import EPSILON, FINEWEB, WIKITEXT2, WIKITEXT103, WMT16, WMT17
from tests.contract.task_images.test_published import PAIRS, Mirror, mirror, pairs_of, sgm, tgz
from tests.unit.task_images.cifar10_resnet20.cifar_files import binary_files
from tests.unit.task_images.cifar10_resnet20.cifar_files import pack as pack_cifar
from tests.unit.task_images.imagenet_resnet.imagenet_files import CLASSES
from tests.unit.task_images.imagenet_resnet.imagenet_files import archives as imagenet_archives
from tests.unit.task_images.language.shards import write_shard

__all__ = ["mirror"]  # a fixture

# What the double has less of than the real data.
SMALLER = {"imagenet_resnet": {"classes": len(CLASSES)}, "wmt17_transformer": {"vocabulary": 400}}
NO_FILES = {"allreduce", "certify", "digits_resnet"}


def idx(array: np.ndarray) -> bytes:
    return gzip.compress(struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes())


def zipped(files: dict[str, str]) -> bytes:
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w") as packed:
        for name, text in files.items():
            packed.writestr(name, text)
    return target.getvalue()


def shard(folder: Path, name: str) -> bytes:
    write_shard(folder / name, np.arange(60) % 50_257)
    return (folder / name).read_bytes()


def translations(names: Iterable[str], archives: Iterable[Archive], test: dict[str, str]) -> dict[Archive, bytes]:
    contents = [*(tgz(pairs_of(name)) for name in names), tgz(test)]
    return dict(zip(archives, contents, strict=True))


def files_of(task: str, folder: Path) -> dict[Archive, bytes]:
    """What the double serves for a task."""
    english, german = ([pair[side] for pair in PAIRS] for side in (0, 1))
    vocabulary = "\n".join(
        [*SPECIAL, *"abcdefghijklmnopqrstuvwxyz.-=", *(f"##{c}" for c in "abcdefghijklmnopqrstuvwxyz")]
    )
    if task.startswith("cifar10"):
        return {BINARY: pack_cifar(binary_files())}
    if task == "mnist":
        images, labels = np.zeros((12, 28, 28), np.uint8), np.arange(12, dtype=np.uint8) % 10
        return dict(zip(MNIST, [idx(images), idx(labels)] * 2, strict=True))
    if task == "epsilon_logistic_regression":
        rows = bz2.compress("".join(f"{1 if n % 2 else -1} 1:0.5 2000:{n / 10}\n" for n in range(20)).encode())
        return dict.fromkeys(EPSILON.archives, rows)
    if task == "wikitext2_awd_lstm":
        texts = {f"wikitext-2/wiki.{split}.tokens": "some words of text\n" * 9 for split in ("train", "valid", "test")}
        return {WIKITEXT2.archives[0]: zipped(texts)}
    if task == "bert_pretraining":
        text = " \n = Heading = \n \n a well @-@ known text . \n" * 20
        texts = {f"wikitext-103-raw/wiki.{split}.raw": text for split in ("train", "valid")}
        return dict(zip(WIKITEXT103.archives, [zipped(texts), vocabulary.encode()], strict=True))
    if task == "gpt_pretraining":
        return {archive: shard(folder, archive.name) for archive in FINEWEB.archives}
    if task == "wmt16_gnmt":
        test = {"dev/newstest2014-deen-ref.en.sgm": sgm(english), "dev/newstest2014-deen-src.de.sgm": sgm(german)}
        names = ["europarl-v7.de-en", "commoncrawl.de-en", "news-commentary-v11.de-en"]
        return translations(names, WMT16.archives, test)
    if task == "wmt17_transformer":
        test = {"test/newstest2014-deen-src.en.sgm": sgm(english), "test/newstest2014-deen-ref.de.sgm": sgm(german)}
        names = ["news-commentary-v12.de-en", "commoncrawl.de-en", "europarl-v7.de-en"]
        return translations(names, WMT17.archives, test)
    assert task == "imagenet_resnet"
    return dict(zip((IMAGENET.training, IMAGENET.validation, IMAGENET.kit), imagenet_archives().values(), strict=True))


def serve(mirror: Mirror, files: dict[Archive, bytes], patch: pytest.MonkeyPatch) -> None:
    """Serve files, and give the tables their sizes and digests."""
    for archive, content in files.items():
        patch.setitem(vars(archive), "bytes", len(content))
        patch.setitem(vars(archive), "digest", f"sha256:{hashlib.sha256(content).hexdigest()}")
        mirror.add(f"{archive.url}/{archive.name}" if archive.url.endswith("images") else archive.url, content)


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The preparation runs in this process, where the tables are the double's."""

    @contextmanager
    def run_here(command: list[str], env: dict[str, str], **_: Any) -> Iterator[SimpleNamespace]:
        task = command[command.index("task_images.prepare") + 1]
        parameters = json.loads(env["MLBENCH_PARAMETERS"]) | SMALLER.get(task, {})
        monkeypatch.setattr(sys, "argv", ["prepare", *command[command.index(task) :]])
        out, code = io.StringIO(), 0
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", out)
            try:
                prepare.main(Contract({**env, "MLBENCH_PARAMETERS": json.dumps(parameters)}))
            except TaskError as error:
                print(error, file=sys.stderr)
                code = error.exit_code
        yield SimpleNamespace(stdout=io.StringIO(out.getvalue()), stderr=(), returncode=code)

    monkeypatch.setattr(data, "subprocess", SimpleNamespace(Popen=run_here, PIPE=subprocess.PIPE))


@pytest.mark.parametrize("task", sorted(load_catalog()))
@pytest.mark.usefixtures("in_process")
def test_the_data_of_every_task_arrive_by_one_command(
    mirror: Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], task: str
) -> None:
    folder, command = tmp_path / "data", ["data", "prepare", task, "-o", "json", "--data-dir", str(tmp_path / "data")]
    if task not in NO_FILES:
        files = files_of(task, tmp_path)
        serve(mirror, files, monkeypatch)
    if task == "imagenet_resnet":  # needs an account, so that its files come from a place of one's own
        site = os.environ["MLBENCH_DATA_MIRROR"]
        for archive in files:
            command += ["--import", f"{site}/{archive.url.partition('://')[2]}/{archive.name}"]
    assert run(command) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["task"] == task
    if task in NO_FILES:
        assert (document["data_identity"] is None) == (task != "digits_resnet")
        return
    identity = document["data_identity"]
    assert identity["digest"].startswith("sha256:")
    assert identity["official"] is False  # complete data alone are official
    assert {archive.name for archive in files} <= {path.name for path in folder.rglob("*")}
    asked = len(mirror.asked)
    assert run(command) == 0
    assert len(mirror.asked) == asked
    assert json.loads(capsys.readouterr().out) == document
    if task != "bert_pretraining":  # whose hidden tokens follow from the seed
        inputs, targets = load_validation(task, folder)
        assert len(inputs) == len(targets) > 0
