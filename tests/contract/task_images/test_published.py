"""Data sets that arrive by `prepare_data` of each task, from a local server with the official paths."""

import bz2
import gzip
import io
import re
import tarfile
import threading
import time
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from task_images import fetch as datasets
from task_images import published
from task_images.bert_pretraining.data import prepare_data as prepare_bert
from task_images.bert_pretraining.texts import SPECIAL
from task_images.contract import EnvironmentUnfitError
from task_images.epsilon_logistic_regression import data as epsilon
from task_images.fetch import DownloadError
from task_images.gpt_pretraining import task as gpt
from task_images.published import Published, fetch_published
from task_images.wikitext2_awd_lstm import data as wikitext
from task_images.wmt16_gnmt import data as wmt16
from task_images.wmt17_transformer import data as wmt17
from tests.needs import needs
from tests.unit.task_images.language.shards import write_shard

PAIRS = [("the house is small", "das Haus ist klein"), ("a red car", "ein rotes Auto"), ("we see it", "wir sehen es")]


class Mirror:
    """Serves HOST/PATH of the official addresses. The first answer about each file breaks off in its middle."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.asked: list[tuple[str, str | None]] = []

    def add(self, url: str, content: bytes) -> None:
        self.files[url.partition("://")[2]] = content

    def answer(self, handler: Any) -> None:
        name, wanted = handler.path.lstrip("/"), handler.headers.get("Range")
        is_first = name not in [each for each, _ in self.asked]
        self.asked.append((name, wanted))
        content = self.files.get(name)
        if content is None:
            handler.send_error(404)
            return
        start = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted else 0
        handler.send_response(206 if start else 200)
        if start:
            handler.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        handler.send_header("Content-Length", str(len(content) - start))
        handler.end_headers()
        handler.wfile.write(content[start : len(content) // 2 if is_first else None])


@pytest.fixture
def mirror(monkeypatch: pytest.MonkeyPatch) -> Iterator[Mirror]:
    found = Mirror()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found.answer(self)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as web:
        threading.Thread(target=web.serve_forever, daemon=True).start()
        monkeypatch.setenv("MLBENCH_DATA_MIRROR", f"http://127.0.0.1:{web.server_port}")
        monkeypatch.setattr(datasets, "ATTEMPTS", 2)
        monkeypatch.setattr(time, "sleep", lambda _: None)
        yield found
        web.shutdown()


def without_digests(module: Any, name: str, monkeypatch: pytest.MonkeyPatch, count: int | None = None) -> Published:
    """The table's entry with the sizes and digests of nobody, since the double has other contents."""
    found: Published = getattr(module, name)
    local = [replace(archive, bytes=0, digest="", mirrors=()) for archive in found.archives[:count]]
    cut = replace(found, archives=tuple(local))
    monkeypatch.setattr(module, name, cut)
    return cut


def tgz(files: dict[str, str]) -> bytes:
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w:gz") as packed:
        for name, text in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(text.encode())
            packed.addfile(info, io.BytesIO(text.encode()))
    return target.getvalue()


def pairs_of(name: str, times: int = 40) -> dict[str, str]:
    return {
        f"{name}.en": "".join(f"{english} {number}\n" for number in range(times) for english, _ in PAIRS),
        f"{name}.de": "".join(f"{german} {number}\n" for number in range(times) for _, german in PAIRS),
    }


def sgm(texts: list[str]) -> str:
    segments = "".join(f'<seg id="{number}">{text}</seg>\n' for number, text in enumerate(texts, 1))
    return f'<srcset setid="newstest2014">\n<doc docid="1">\n<p>\n{segments}</p>\n</doc>\n</srcset>\n'


def test_epsilon_arrives_and_a_repeat_fetches_nothing(
    mirror: Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = without_digests(epsilon, "EPSILON", monkeypatch)
    rows = "".join(f"{1 if n % 2 else -1} 1:0.5 2000:{n / 10}\n" for n in range(20))
    for archive in entry.archives:
        mirror.add(archive.url, bz2.compress(rows.encode()))
    found = epsilon.prepare_data(tmp_path, {})
    assert found.counts == {"training rows": 20, "validation rows": 20}
    assert found.official is False
    assert [wanted for _, wanted in mirror.asked if wanted]  # what broke off was resumed, not begun again
    asked = len(mirror.asked)
    epsilon.prepare_data(tmp_path, {})
    assert len(mirror.asked) == asked


def test_wikitext_arrives(mirror: Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = without_digests(wikitext, "WIKITEXT2", monkeypatch)
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w") as packed:
        for split in wikitext.SPLITS:
            packed.writestr(f"wikitext-2/wiki.{split}.tokens", f"some words of {split} text\n" * 9)
    mirror.add(entry.archives[0].url, target.getvalue())
    assert wikitext.prepare_data(tmp_path, {}).counts["train words"] == 9 * 6


def test_shards_arrive_and_an_interrupted_fetch_goes_on(
    mirror: Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = without_digests(gpt, "FINEWEB", monkeypatch, count=3)
    shards = tmp_path / "source"
    shards.mkdir()
    for archive in entry.archives:
        write_shard(shards / archive.name, np.arange(500) % 50_257)
        mirror.add(archive.url, (shards / archive.name).read_bytes())
    target = tmp_path / "data"
    target.mkdir()
    last = mirror.files.pop(entry.archives[2].url.partition("://")[2])
    with pytest.raises(DownloadError, match="404"):
        gpt.prepare_data(target, {})
    mirror.add(entry.archives[2].url, last)
    found = gpt.prepare_data(target, {})
    assert found.counts["training tokens"] == 1000
    assert {path.name for path in target.glob("*.bin")} == {archive.name for archive in entry.archives}


def test_wmt17_arrives_with_a_dictionary(mirror: Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = without_digests(wmt17, "WMT17", monkeypatch)
    training = [
        tgz({f"training/{name}": text for name, text in pairs_of("news-commentary-v12.de-en").items()}),
        tgz(pairs_of("commoncrawl.de-en")),
        tgz({f"training/{name}": text for name, text in pairs_of("europarl-v7.de-en").items()}),
        tgz(
            {
                "test-full/newstest2014-deen-src.en.sgm": sgm([english for english, _ in PAIRS]),
                "test-full/newstest2014-deen-ref.de.sgm": sgm([german for _, german in PAIRS]),
            }
        ),
    ]
    for archive, content in zip(entry.archives, training, strict=True):
        mirror.add(archive.url, content)
    found = wmt17.prepare_data(tmp_path, {"vocabulary": 400, "longest": 100, "longest_test": 0})
    assert found.counts == {"training pairs": 3 * 3 * 40, "test pairs": 3}
    assert (tmp_path / "test.de").read_text().splitlines() == [german for _, german in PAIRS]


def test_wmt16_arrives_tokenized_and_in_subwords(
    mirror: Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs("sacremoses")
    entry = without_digests(wmt16, "WMT16", monkeypatch)
    contents = [
        tgz(pairs_of("europarl-v7.de-en")),
        tgz(pairs_of("commoncrawl.de-en")),
        tgz({f"training-parallel-nc-v11/{name}": text for name, text in pairs_of("news-commentary-v11.de-en").items()}),
        tgz(
            {
                "dev/newstest2014-deen-ref.en.sgm": sgm([english for english, _ in PAIRS]),
                "dev/newstest2014-deen-src.de.sgm": sgm([german for _, german in PAIRS]),
            }
        ),
    ]
    for archive, content in zip(entry.archives, contents, strict=True):
        mirror.add(archive.url, content)
    found = wmt16.prepare_data(tmp_path, {"longest": 50, "longest_test": 0})
    assert found.counts == {"training pairs": 3 * 3 * 40, "test pairs": 3}


def test_a_file_that_changed_at_its_address_is_noticed(
    mirror: Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = without_digests(wikitext, "WIKITEXT2", monkeypatch)
    said: list[str] = []
    mirror.add(entry.archives[0].url, gzip.compress(b"one"))
    fetch_published(entry, tmp_path, said.append)
    assert "recorded, no published one" in said[-1]
    assert any("license: CC BY-SA 3.0" in line for line in said)
    (tmp_path / "wikitext-2-v1.zip").unlink()
    mirror.add(entry.archives[0].url, gzip.compress(b"two"))
    with pytest.raises(EnvironmentUnfitError, match="sha256"):
        fetch_published(entry, tmp_path, said.append)


def test_own_texts_for_bert_are_asked_for_by_name(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentUnfitError, match=r"there is no .*train\.txt") as caught:
        prepare_bert(tmp_path, {"data": "text"})
    assert "--preset own --import train.txt" in (caught.value.hint or "")
    for name in ("train.txt", "valid.txt"):
        (tmp_path / name).write_text("a few words\n\nand a few more words\n" * 30)
    (tmp_path / "vocab.txt").write_text("\n".join([*SPECIAL, "a", "few", "words", "and", "more"]))
    found = prepare_bert(tmp_path, {"data": "text"})
    assert found.counts["training tokens"] > 100
    assert found.official is None


def test_every_address_and_digest_of_the_table_has_the_form_of_one() -> None:
    for entry in vars(published).values():
        if isinstance(entry, Published):
            assert entry.license
            assert entry.source
            for archive in entry.archives:
                assert archive.url.startswith(("http://", "https://"))
                assert archive.url.endswith(archive.name)
                assert re.fullmatch("(md5:[0-9a-f]{32}|sha1:[0-9a-f]{40}|sha256:[0-9a-f]{64})?", archive.digest)
