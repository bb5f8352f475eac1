"""Parallel text out of archives: parts in order, segments of SGML, what is missing, and the figures of BLEU."""

import io
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
import sacrebleu

from task_images.harness.errors import EnvironmentUnfitError
from task_images.harness.translation import pairs as pairs_module
from task_images.harness.translation.bleu import (
    corpus_bleu,
    international_bleu,
    mean_of_batches,
    split_punctuation,
    tokenized_bleu,
)
from task_images.harness.translation.corpora import Part, join_parts
from task_images.harness.translation.extras import need
from task_images.harness.translation.pairs import (
    Encoded,
    Pairs,
    Side,
    digest_pairs,
    encode_text,
    file_size,
    read_encoded,
    read_indexed,
    read_prepacked,
)


def pack(path: Path, files: Mapping[str, bytes]) -> None:
    with tarfile.open(path, "w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


PARTS = (Part("one.tgz", ("a.en", "a.de")), Part("two.tgz", ("test.en.sgm", "test.de.sgm")))
SGM = '<doc id="1">\n<p>\n<seg id="1"> {} </seg>\n<SEG>\n<seg id="2">{}</seg>\n</doc>\n'


def make_archives(folder: Path) -> None:
    pack(
        folder / "one.tgz", {"corpus/a.en": b"one\r\ntwo", "corpus/readme": b"no text", "corpus/a.de": b"eins\nzwei\n"}
    )
    pack(
        folder / "two.tgz",
        {"x/test.de.sgm": SGM.format("drei", "vier").encode(), "x/test.en.sgm": SGM.format("three", "four").encode()},
    )


def test_parts_are_joined_in_their_order_with_the_segments_of_sgml(tmp_path: Path) -> None:
    make_archives(tmp_path)
    said: list[str] = []
    join_parts(tmp_path, PARTS, tmp_path / "out", "train", said.append)
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == {
        "train.en": b"one\ntwo\nthree\nfour\n",
        "train.de": b"eins\nzwei\ndrei\nvier\n",
    }
    assert said == ["train: 2 pairs of a.en", "train: 2 pairs of test.en.sgm"]


def test_joined_files_are_not_made_again_but_one_alone_is_not_enough(tmp_path: Path) -> None:
    make_archives(tmp_path)
    out = tmp_path / "out"
    join_parts(tmp_path, PARTS, out, "train", lambda line: None)
    (out / "train.de").write_text("kept")
    join_parts(tmp_path, PARTS, out, "train", lambda line: None)
    assert (out / "train.de").read_text() == "kept"
    (out / "train.en").unlink()
    join_parts(tmp_path, PARTS, out, "train", lambda line: None)
    assert (out / "train.de").read_text() == "eins\nzwei\ndrei\nvier\n"


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"a.en": b"one\ntwo\n", "a.de": b"eins\n"}, "a.en has 2 lines and a.de has 1"),
        ({"a.en": b"", "a.de": b""}, "a.en has 0 lines and a.de has 0"),
        ({"a.en": b"one\n"}, "has no a.de"),
        ({}, "has no a.en"),
        (None, "cannot be read"),
    ],
)
def test_a_part_that_is_not_parallel_or_not_there_leaves_no_file(
    tmp_path: Path, files: Mapping[str, bytes] | None, words: str
) -> None:
    if files is None:
        (tmp_path / "one.tgz").write_bytes(b"no archive")
    else:
        pack(tmp_path / "one.tgz", files)
    with pytest.raises(EnvironmentUnfitError, match=words) as caught:
        join_parts(tmp_path, PARTS[:1], tmp_path / "out", "train", lambda line: None)
    assert "prepare the data again" in str(caught.value.hint)
    assert not (tmp_path / "out" / "train.en").exists()
    assert not (tmp_path / "out" / "train.de").exists()


# --- BLEU -----------------------------------------------------------------------------------------------------------

HYPOTHESES = ["The cat is on the mat , said Bob-Dylan 's dog .", "a b c d e f g", "Nothing in common"]
REFERENCES = ["The Cat is on a mat, said Bob-Dylan's dog.", "a b c d e x g", "Something else entirely here"]


def test_scores_are_those_of_sacrebleus_functions() -> None:
    for lowercase in (False, True):
        wanted = sacrebleu.corpus_bleu(HYPOTHESES, [REFERENCES], lowercase=lowercase, tokenize="13a")
        found = corpus_bleu(HYPOTHESES, REFERENCES, lowercase)
        assert found.score == pytest.approx(wanted.score)
        assert f"case:{'lc' if lowercase else 'mixed'}" in found.signature
    wanted = sacrebleu.corpus_bleu(HYPOTHESES, [REFERENCES], lowercase=True, tokenize="intl")
    assert international_bleu(HYPOTHESES, REFERENCES) == pytest.approx(wanted.score)


@pytest.mark.parametrize("floor", [0.0, 0.1])
def test_tokenized_scores_have_a_floor_for_orders_without_a_match(floor: float) -> None:
    wanted = sacrebleu.corpus_bleu(
        HYPOTHESES[1:], [REFERENCES[1:]], tokenize="none", smooth_method="floor", smooth_value=floor, force=True,
        use_effective_order=True,
    )  # fmt: skip
    assert tokenized_bleu(HYPOTHESES[1:], REFERENCES[1:], floor) == pytest.approx(wanted.score)
    assert tokenized_bleu(["a b"], ["a c"], 0.1) > tokenized_bleu(["a b"], ["a c"])


def test_a_mean_of_batches_weighs_the_last_batch_by_its_sentences() -> None:
    sizes: list[int] = []

    def score(hypotheses: Sequence[str], references: Sequence[str]) -> float:
        assert [int(one) + 10 for one in hypotheses] == [int(one) for one in references]
        sizes.append(len(hypotheses))
        return float(hypotheses[0])

    found = mean_of_batches(score, ["0", "1", "2", "3", "4"], ["10", "11", "12", "13", "14"], 2)
    assert sizes == [2, 2, 1]
    assert found == pytest.approx((0 * 2 + 2 * 2 + 4 * 1) / 5)


def test_punctuation_between_digits_stays_and_symbols_stand_alone() -> None:
    assert split_punctuation("a.b 1.5 2.x x.2 3$4").split() == [
        *("a", ".", "b", "1.5", "2", ".", "x", "x", ".", "2", "3", "$", "4")
    ]


def test_a_missing_package_is_named_with_the_way_to_install_it() -> None:
    need("sacrebleu", "json")
    with pytest.raises(EnvironmentUnfitError, match="the package surely_not_installed is not installed") as caught:
        need("json", "surely_not_installed")
    assert "language" in str(caught.value.hint)


# --- word numbers on disk -------------------------------------------------------------------------------------------


def make_side(*sentences: list[int]) -> Side:
    lengths = np.array([len(one) for one in sentences])
    return Side(np.concatenate(sentences), np.cumsum(lengths) - lengths, lengths)


def test_the_digest_depends_on_sentences_and_not_on_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    side = make_side([1, 2], [3], [4, 5, 6])
    shifted = Side(np.array([9, 9, *side.numbers, 9], np.int32), side.starts + 2, side.lengths)
    one = digest_pairs(Pairs(side, side))
    assert one == digest_pairs(Pairs(shifted, shifted))
    assert one.startswith("sha256:")
    assert len(one) == len("sha256:") + 64
    assert one != digest_pairs(Pairs(make_side([1, 2, 3], [4], [5, 6]), side))
    assert one != digest_pairs(Pairs(make_side([1, 2], [3], [4, 5, 7]), side))
    monkeypatch.setattr(pairs_module, "_DIGEST_BLOCK", 2)
    assert one == digest_pairs(Pairs(side, side))


def test_pairs_up_to_the_longest_stay_and_the_longer_side_counts() -> None:
    pairs = Pairs(make_side([1], [2, 3], [4]), make_side([1, 2, 3], [4], [5]), {"too long": 2, "empty": 1})
    assert len(pairs) == 3
    within = pairs.within(2)
    assert [within.source.sentence(at) for at in range(len(within))] == [[2, 3], [4]]
    assert within.left_out == {"too long": 3, "empty": 1}
    assert pairs.within(3).left_out == {"too long": 2, "empty": 1}
    assert Pairs(make_side([1]), make_side([1])).within(0).left_out == {"too long": 1}


def test_the_greatest_word_number_may_be_one_less_than_the_vocabulary() -> None:
    pairs = Pairs(make_side([1, 8]), make_side([9]))
    pairs.check(10, "it")
    with pytest.raises(EnvironmentUnfitError, match="the word number 9, but the vocabulary holds 9"):
        pairs.check(9, "it")


def encode(line: str) -> list[int]:
    return [len(word) for word in line.split()]


def write_texts(folder: Path, source: str, target: str) -> tuple[Path, Path]:
    texts = folder / "a.en", folder / "a.de"
    for path, text in zip(texts, (source, target), strict=True):
        path.write_text(text, "utf-8")
    return texts


@pytest.mark.parametrize(("vocabulary", "size"), [(32_767, 2), (32_768, 4)])
def test_word_numbers_have_two_bytes_as_long_as_the_vocabulary_fits(tmp_path: Path, vocabulary: int, size: int) -> None:
    texts = write_texts(tmp_path, "a bb\nccc\n", "d\nee f\n")
    encode_text(texts, encode, tmp_path, vocabulary, 0)
    assert (tmp_path / "source.bin").stat().st_size == 3 * size
    pairs = read_encoded(tmp_path)
    assert pairs.source.numbers.dtype.itemsize == size
    assert [pairs.target.sentence(at) for at in (0, 1)] == [[1], [2, 1]]
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_exactly_the_longest_sentence_is_kept(tmp_path: Path) -> None:
    texts = write_texts(tmp_path, "a b c\na b c d\na\n", "a\na\na b c d\n")
    encode_text(texts, encode, tmp_path, 10, 3)
    pairs = read_encoded(tmp_path)
    assert len(pairs) == 1
    assert pairs.left_out == {"too long": 2, "empty": 0}


@pytest.mark.parametrize("stored", ["", "{", "[]", '{"lines": 3}', '{"lines": 3, "left_out": {}, "written": [1]}'])
def test_a_damaged_journal_begins_anew(tmp_path: Path, stored: str) -> None:
    (tmp_path / ".journal.json").write_text(stored)
    assert Encoded.read(tmp_path) == Encoded(0, {"too long": 0, "empty": 0}, [(0, 0), (0, 0)])


def test_a_journal_is_read_as_it_was_kept(tmp_path: Path) -> None:
    (tmp_path / ".journal.json").write_text(
        '{"lines": 30, "left_out": {"too long": 2, "empty": 1}, "written": [[27, 81], [27, 90]]}'
    )
    assert Encoded.read(tmp_path) == Encoded(30, {"too long": 2, "empty": 1}, [(27, 81), (27, 90)])


def test_a_missing_file_has_no_bytes(tmp_path: Path) -> None:
    assert file_size(tmp_path / "none") == 0
    (tmp_path / "some").write_bytes(b"abc")
    assert file_size(tmp_path / "some") == 3


def test_an_index_without_sentences_and_with_a_foreign_type(tmp_path: Path) -> None:
    texts = write_texts(tmp_path, "", "")
    encode_text(texts, encode, tmp_path, 10, 0)
    assert len(read_encoded(tmp_path)) == 0
    index = tmp_path / "source.idx"
    good = index.read_bytes()
    for place, value in ((8, 2), (16, 6), (40, 1)):  # version, type, number of sizes
        index.write_bytes(good[:place] + value.to_bytes(8, "little") + good[place + 8 :])
        with pytest.raises(EnvironmentUnfitError, match="is not an index of this form") as caught:
            read_indexed(tmp_path / "source")
        assert caught.value.hint == "Prepare the data again."
    index.unlink()
    with pytest.raises(EnvironmentUnfitError, match=r"source\.idx cannot be read: No such file"):
        read_indexed(tmp_path / "source")


@pytest.mark.parametrize("code", [1, 2, 3, 4, 5])
def test_the_types_of_torchnets_index(tmp_path: Path, code: int) -> None:
    """Its numbering of types: 1 unsigned byte, 2 char, 3 short, 4 int, 5 long."""
    kind = np.dtype({1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8"}[code])
    (tmp_path / "x.bin").write_bytes(np.array([7, 100, 5], kind).tobytes())
    tables = np.array([1, code, kind.itemsize, 2, 2, *(0, 1, 2), *(0, 1, 3), *(1, 2)], "<i8")
    (tmp_path / "x.idx").write_bytes(b"TNTIDX\0\0" + tables.tobytes())
    side = read_indexed(tmp_path / "x")
    assert [side.sentence(at) for at in (0, 1)] == [[7], [100, 5]]
    tables[-1] = 3  # the last sentence would end behind the data
    (tmp_path / "x.idx").write_bytes(b"TNTIDX\0\0" + tables.tobytes())
    with pytest.raises(EnvironmentUnfitError, match=r"x\.bin is shorter than its index says"):
        read_indexed(tmp_path / "x")


@pytest.mark.parametrize(
    ("source", "target", "fits"), [((1, 3), (3, 1), True), ((0, 3), (3, 1), False), ((1, 3), (4, 1), False)]
)
def test_lengths_of_a_prepacked_corpus_are_from_1_to_its_width(
    tmp_path: Path, source: tuple[int, int], target: tuple[int, int], fits: bool
) -> None:
    head = np.array([2, 32_767, 1, 3, *source, *target, 9 * 8], "<i8").tobytes()
    (tmp_path / "x").write_bytes(head + np.arange(12, dtype="<i2").tobytes())
    if fits:
        pairs = read_prepacked(tmp_path / "x", 32_767)
        assert pairs.source.sentence(1) == [6, 7, 8]
        assert pairs.target.sentence(0) == [3, 4, 5]
        return
    with pytest.raises(EnvironmentUnfitError, match=r"lengths outside of 1 \.\.\. 3"):
        read_prepacked(tmp_path / "x", 32_767)
