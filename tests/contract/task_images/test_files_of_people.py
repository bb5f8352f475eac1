"""Data sets as people have them: half extracted, renamed, with byte order marks, or cut off."""

import gzip
import itertools
import json
import os
import pickle
import shutil
import struct
import sys
import tarfile
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mlbench_cli.tasks.catalog import load_task
from task_images import gpu as nccl
from task_images.bert_pretraining.data import load_text
from task_images.bert_pretraining.texts import SPECIAL, UNKNOWN
from task_images.cifar10_resnet20 import data as cifar
from task_images.contract import EnvironmentUnfitError
from task_images.epsilon_logistic_regression import data as libsvm
from task_images.mnist import data as mnist
from task_images.wikitext2_awd_lstm import data as wikitext
from task_images.wmt17_transformer import data as wmt17
from tests.contract.local_runs import until

# --- CIFAR-10 ---------------------------------------------------------------------------------------------------------

BATCHES = [*cifar.TRAINING, *cifar.VALIDATION]


def write_cifar(folder: Path, names: list[str], keys: tuple[str | bytes, str | bytes] = (b"data", b"labels")) -> None:
    folder.mkdir(exist_ok=True)
    for number, name in enumerate(names):
        batch = dict(zip(keys, (np.full((2, 3072), number, np.uint8), [0, 1]), strict=True))
        (folder / name).write_bytes(pickle.dumps(batch, protocol=2))


@pytest.mark.parametrize("extracted", [[], ["data_batch_1"], BATCHES[:-1], BATCHES])
def test_an_interrupted_extraction_does_not_hide_the_archive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, extracted: list[str]
) -> None:
    write_cifar(tmp_path / "whole", BATCHES)
    with tarfile.open(tmp_path / "cifar-10-python.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "whole", "cifar-10-batches-py")
    write_cifar(tmp_path / "cifar-10-batches-py", extracted)
    if extracted == BATCHES:
        os.truncate(tmp_path / "cifar-10-batches-py" / BATCHES[-1], 100)
    monkeypatch.setattr(cifar, "fetch", lambda *given: tmp_path)  # the digest is that of the published archive
    found = cifar.load(tmp_path, lambda text: None)
    assert [len(found.training[1]), len(found.validation[1])] == [10, 2]


def test_an_incomplete_folder_alone_is_named(tmp_path: Path) -> None:
    write_cifar(tmp_path / "cifar-10-batches-py", BATCHES[:2])
    with pytest.raises(EnvironmentUnfitError, match="cifar-10-batches-py has no data_batch_3"):
        cifar.load(tmp_path, lambda text: None)


@pytest.mark.parametrize(
    "place",
    ["cifar-10-batches-py/cifar-10-batches-py", "data/cifar-10-batches-py", "CIFAR10/cifar-10-python/x.tar", "x.tar"],
)
def test_images_are_found_wherever_tools_put_them(tmp_path: Path, place: str) -> None:
    """A folder in one of its name (7-Zip), that of torchvision's examples, and an archive that a browser has unzipped.
    CIFAR-100 has files of other names beside it, and an empty folder is none."""
    (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / "cifar-100-python").mkdir()
    (tmp_path / "cifar-10-batches-bin").mkdir()
    if place.endswith("x.tar"):
        write_cifar(tmp_path / "whole", BATCHES)
        with tarfile.open((tmp_path / place).with_name("cifar-10-python.tar"), "w") as archive:
            archive.add(tmp_path / "whole", "cifar-10-batches-py")
    else:
        write_cifar(tmp_path / place, BATCHES)
    assert [len(labels) for _, labels in cifar.load(tmp_path, lambda text: None)[:2]] == [10, 2]


def test_batches_written_by_python_3_are_read(tmp_path: Path) -> None:
    write_cifar(tmp_path, BATCHES, keys=("data", "labels"))
    assert len(cifar.load(tmp_path, lambda text: None).training[1]) == 10


# --- MNIST ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", ["", "mnist", "MNIST/raw", "raw", "data/MNIST/raw"])
@pytest.mark.parametrize("spelling", ["-idx", ".idx"])
@pytest.mark.parametrize("zipped", [False, True])
def test_mnist_is_found_in_every_spelling(tmp_path: Path, folder: str, spelling: str, zipped: bool) -> None:
    write_mnist(tmp_path / folder, spelling, zipped=zipped)
    found = mnist.read(tmp_path, lambda text: None)
    assert (found.training[0].shape, found.validation[1].tolist()) == ((3, 1, 28, 28), [0, 0, 0])
    wanted = load_task("mnist").files
    assert wanted is not None
    assert not wanted.list_missing(str(tmp_path))


def test_other_sets_with_the_file_names_of_mnist_are_not_taken(tmp_path: Path) -> None:
    write_mnist(tmp_path / "FashionMNIST" / "raw")
    write_mnist(tmp_path / "Mnist_data", images=4)
    assert len(mnist.read(tmp_path, lambda text: None).validation[1]) == 4


def test_mnist_is_found_where_each_file_has_a_folder(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    for path in list(tmp_path.iterdir()):
        path.rename(tmp_path / "moved")
        path.mkdir()
        (tmp_path / "moved").rename(path / path.name)
    assert len(mnist.read(tmp_path, lambda text: None).validation[1]) == 3


def test_mnist_is_read_by_its_content(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    for path in list(tmp_path.iterdir()):
        path.rename(f"{path}.gz")
    assert len(mnist.read(tmp_path, lambda text: None).validation[1]) == 3


def test_files_that_are_mnist_by_another_name_are_named_and_nothing_is_downloaded(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    for path in list(tmp_path.iterdir()):
        path.rename(tmp_path / path.name.partition("-idx")[0])
    with pytest.raises(EnvironmentUnfitError, match="t10k-images is not one of MNIST's own files"):
        mnist.read(tmp_path, lambda text: None, ())


def write_mnist(place: Path, spelling: str = "-idx", *, zipped: bool = False, images: int = 3) -> None:
    place.mkdir(parents=True, exist_ok=True)
    for pair in mnist.FILES.values():
        for name, shape in zip(pair, ((images, 28, 28), (images,)), strict=True):
            raw = struct.pack(f">BBBB{len(shape)}I", 0, 0, 8, len(shape), *shape) + bytes(int(np.prod(shape)))
            path = place / name.replace("-idx", spelling)
            path.with_name(path.name + ".gz").write_bytes(gzip.compress(raw)) if zipped else path.write_bytes(raw)


# --- texts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mark", "end"), [("", "\n"), ("\ufeff", "\n"), ("", "\r\n"), ("\ufeff", "\r\n")])
def test_marks_and_line_ends_are_no_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mark: str, end: str) -> None:
    with zipfile.ZipFile(tmp_path / "wikitext-2-v1.zip", "w") as archive:
        for split in ("train", "valid", "test"):
            text = f"{mark}{end} the cat sat {end} the end {end}"
            archive.writestr(f"wikitext-2/wiki.{split}.tokens", text.encode())
    monkeypatch.setenv("MLBENCH_CACHE", str(tmp_path / "cache"))
    found = wikitext.read_corpus(tmp_path)
    assert [len(found.words), len(found.train)] == [5, 8]  # the, cat, sat, end, and the end of each of three lines


@pytest.mark.parametrize("place", ["wikitext-2", "wikitext-2-v1", "wikitext-2-v1/wikitext-2"])
def test_texts_are_found_where_tools_unpack_them(tmp_path: Path, place: str) -> None:
    (tmp_path / place).mkdir(parents=True)
    for split in ("train", "valid", "test"):
        (tmp_path / place / f"wiki.{split}.tokens").write_text(" the cat \n")
    assert len(wikitext.read_corpus(tmp_path).train) == 3
    wanted = load_task("wikitext2_awd_lstm").files
    assert wanted is not None
    assert not wanted.list_missing(str(tmp_path))
    shutil.rmtree(tmp_path / place)  # they are no longer needed
    assert len(wikitext.read_corpus(tmp_path).train) == 3
    assert not wanted.list_missing(str(tmp_path))


def test_a_damaged_archive_of_a_text_is_named(tmp_path: Path) -> None:
    """A few bytes in the middle, which only unpacking finds."""
    words = " ".join(np.random.default_rng(1).integers(0, 10**6, 5000).astype(str))
    with zipfile.ZipFile(tmp_path / "wikitext-2-v1.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for split in ("train", "valid", "test"):
            archive.writestr(f"wikitext-2/wiki.{split}.tokens", words)
    damaged = bytearray((tmp_path / "wikitext-2-v1.zip").read_bytes())
    damaged[1000:1100] = bytes(100)
    (tmp_path / "wikitext-2-v1.zip").write_bytes(damaged)
    with pytest.raises(EnvironmentUnfitError, match=r"wikitext-2-v1\.zip is not the WikiText-2 archive"):
        wikitext.read_corpus(tmp_path)


@pytest.mark.parametrize("name", ["train.en", "train.de", "test.de"])
def test_a_missing_text_of_a_translation_is_named_and_unpacked_by_a_command(tmp_path: Path, name: str) -> None:
    subtokens = ["<pad>_", "<EOS>_", *"abc", *"\\_u;0123456789"]
    (tmp_path / "dict.en.txt").write_text("".join(f"'{one}'\n" for one in subtokens))
    for each in ("train.en", "train.de", "test.en", "test.de"):
        (tmp_path / each).write_text("a b\nc\n")
    assert len(wmt17.read_corpus(tmp_path, tmp_path / "cache", 100, 50, 0).train) == 2
    (tmp_path / name).rename(tmp_path / f"{name}.gz")
    with pytest.raises(EnvironmentUnfitError, match=f"there is no {name} in {tmp_path}") as refused:
        wmt17.read_corpus(tmp_path, tmp_path / "cache", 100, 50, 0)
    assert refused.value.hint == f"gunzip -k {tmp_path / name}.gz"


def test_a_row_that_was_cut_off_is_refused(tmp_path: Path) -> None:
    rows = "1 1:0.5 2:0.25\n-1 1:0.125 3:0.375"
    (tmp_path / "whole.svm").write_text(rows + "\n")
    assert sum(len(block.labels) for block in libsvm.read_blocks(tmp_path / "whole.svm", 3)) == 2
    (tmp_path / "cut.svm").write_text(rows[:-3])
    with pytest.raises(EnvironmentUnfitError, match="ends in line 2 without a line end"):
        list(libsvm.read_blocks(tmp_path / "cut.svm", 3))


_LETTERS = (*"abeuxy_,[]5\u6226\u5834\u20ac", "\u0928\u092e\u0938\u0924")
_PIECES = [*SPECIAL, *_LETTERS, "un", "able", "unable", "mask", "##b", "##u", "##ab", "##able", "##le"]


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("Unable UNABLE \u00fcnable", "unable unable unable"),  # lower case, without accents
        ("unabable", "un ##ab ##able"),  # the longest piece first
        ("unaba", UNKNOWN),  # a part of a word has no piece
        ("u" * 100, " ".join(["u", *["##u"] * 99])),
        ("u" * 101, UNKNOWN),
        ("able,un x_y", "able , un x _ y"),  # punctuation stands alone, and so do ASCII's symbols
        ("\u6226\u5834", "\u6226 \u5834"),  # every ideograph is a word
        ("a\u200bb a\u00adb", "a ##b a ##b"),  # control and format characters vanish
        ("\u0928\u092e\u0938\u094d\u0924", "\u0928\u092e\u0938\u0924"),  # a mark within a word
        ("\u20ac5", f"{UNKNOWN}"),  # a symbol outside ASCII is a letter
        ("[MASK]", "[ mask ]"),  # what a text says is no special piece
    ],
)
def test_texts_are_cut_into_pieces_by_berts_rules(tmp_path: Path, text: str, pieces: str) -> None:
    """Those of google-research/bert, tokenization.py."""
    for name in ("train.txt", "valid.txt"):
        (tmp_path / name).write_text(f"{text}\n")
    (tmp_path / "vocab.txt").write_text("\n".join(_PIECES))
    corpus, _ = load_text(tmp_path, len(_PIECES))
    assert [_PIECES[number] for number in corpus.train] == pieces.split()


@pytest.mark.parametrize("name", ["train.txt", "valid.txt"])
def test_a_text_without_words_is_refused_when_it_is_prepared(tmp_path: Path, name: str) -> None:
    for each in ("train.txt", "valid.txt"):
        (tmp_path / each).write_text("able\n" if each != name else "\n \n")
    (tmp_path / "vocab.txt").write_text("\n".join(_PIECES))
    with pytest.raises(EnvironmentUnfitError, match=f"{name} holds no words"):
        load_text(tmp_path, len(_PIECES))


# --- machines ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("missing", ["", "utilization", "device_memory_used", "power_draw"])
@pytest.mark.parametrize(("rocm", "watts"), [(None, 100.0), ("6.4", 100_000.0)])
def test_one_missing_counter_of_a_gpu_costs_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str, rocm: str | None, watts: float
) -> None:
    """Partitions (MIG), unified memory and old drivers lack some. torch gives the power of AMD's GPUs in watts."""

    def fail(_: object) -> int:
        raise RuntimeError("Not Supported")

    properties = SimpleNamespace(pci_domain_id=0, pci_bus_id=1, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    names = {"utilization": "utilization_percent", "power_draw": "power_watts"}
    names["device_memory_used"] = "peak_memory_bytes"
    for name in names:
        monkeypatch.setattr(torch.cuda, name, fail if name == missing else lambda _: 100_000)
    monkeypatch.setattr(torch.version, "hip", rocm)
    joules = itertools.count(5_000_000, 1_000)  # since the driver was loaded, in millijoules
    library = SimpleNamespace(nvmlInit=lambda: None, nvmlDeviceGetHandleByPciBusId=lambda _: None)
    library.nvmlDeviceGetTotalEnergyConsumption = lambda _: next(joules)
    monkeypatch.setitem(sys.modules, "pynvml", library)
    with nccl.GpuSampler(torch.device("cuda", 0), tmp_path, seconds=0.01) as sampler:
        until(lambda: bool(sampler.facts()))
    found: dict[str, Any] = sampler.facts()
    assert set(found) - {"samples", "energy_joules"} == {each for name, each in names.items() if name != missing}
    assert found.get("power_watts", watts) == watts
    assert 0 < found["energy_joules"] < 5_000
    rows = [json.loads(line) for line in (tmp_path / "gpu.jsonl").read_text().splitlines()]
    assert {row["address"] for row in rows} == {"00000000:01:00.0"}


def test_channels_and_transport_of_nccl_s_own_lines() -> None:
    """Lines as src/init.cc and src/transport/net.cc print them."""
    found = nccl.parse_log(
        "m1:7:7 [0] NCCL INFO 8 coll channels, 0 collnet channels, 0 nvls channels, 8 p2p channels, "
        "2 p2p channels per peer\n"
        "m1:7:9 [0] NCCL INFO Channel 00/0 : 1[0] -> 0[0] [receive] via NET/IB/0/GDRDMA\n"
        "m1:7:9 [0] NCCL INFO Channel 01/0 : 9[1] -> 0[0] [receive] via NET/IB/2(4)/GDRDMA\n"  # PXN
        "m1:7:9 [0] NCCL INFO CollNet 00/0 : 0 [send] via COLLNET/SHARP/0/GDRDMA\n"
        "m1:7:9 [0] NCCL INFO Channel 02/0 : 0[0] -> 1[1] via P2P/CUMEM/read\n"
        "m1:7:9 [0] NCCL INFO Channel 02/0 : 0[0] -> 8[0] [send] via NET/AWS Libfabric/3/GDRDMA/Shared\n"
    )
    assert found["channels"] == {"collective": 8, "p2p": 8}
    assert found["ways"] == ["COLLNET/SHARP/GDRDMA", "NET/AWS Libfabric/GDRDMA", "NET/IB/GDRDMA", "P2P/CUMEM"]
