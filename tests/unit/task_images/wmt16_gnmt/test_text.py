"""Subwords, subtokens, Moses, BLEU: against the reference programs' own output."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from task_images.contract import EnvironmentUnfitError
from task_images.translation.bleu import corpus_bleu
from task_images.translation.sample import write_sample
from task_images.wmt16_gnmt.data import Vocabulary, prepare, read_vocabulary, undo
from task_images.wmt17_transformer.data import END, Subtokens, make_dictionary, read_dictionary


def test_subwords_become_words_again() -> None:
    assert undo("lo@@ west ne@@ w@@ e@@ r x") == "lowest newer x"
    assert undo("wi@@ de") == "wide"


def test_the_vocabulary_begins_with_marks_and_is_rounded_up() -> None:
    vocabulary = Vocabulary([f"w{number}" for number in range(32_313)])
    assert vocabulary.size == 32_320
    assert vocabulary.encode("w0 w5 other") == [2, 4, 9, 1, 3]
    with pytest.raises(EnvironmentUnfitError, match="contains a word twice"):
        Vocabulary(["a", "a"])


def test_a_vocabulary_file_has_one_word_a_line(tmp_path: Path) -> None:
    (tmp_path / "vocab").write_text("a\nb 5\n")
    with pytest.raises(EnvironmentUnfitError, match=r"line 2 of .* is not one word: 'b 5'"):
        read_vocabulary(tmp_path / "vocab")
    (tmp_path / "vocab").write_text("")
    with pytest.raises(EnvironmentUnfitError, match="vocab is empty"):
        read_vocabulary(tmp_path / "vocab")


def test_numbers_become_a_sentence_as_people_write_it() -> None:
    vocabulary = Vocabulary(["Das", "ist", ",", "wei@@", "ß", "man", "gut", ".", "&quot;"])
    words = vocabulary.encode("Das wei@@ ß man , &quot; ist gut . &quot;")
    assert vocabulary.decode(words) == 'Das weiß man, "ist gut."'
    assert vocabulary.decode([*words, vocabulary.size - 1]) == vocabulary.decode(words)


def test_preparation_from_raw_text(tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    raw.mkdir()
    write_sample(raw, train=200, test=5, seed=1)
    for language in ("en", "de"):
        (raw / f"test.{language}").rename(raw / f"newstest2014.{language}")
        with (raw / f"train.{language}").open("a", encoding="utf-8") as file:
            file.write("Ελληνικά\n\n" + "word " * 81 + "\n" + "It's “quoted”?\n".replace("“", '"').replace("”", '"'))
    counts = prepare(raw, tmp_path / "out", merges=50)
    assert counts["kept"] == 201
    assert counts["left out"] == 3
    out = tmp_path / "out"
    assert sorted(path.name for path in out.iterdir()) == [
        "bpe.32000",
        "newstest2014.de",
        "newstest2014.tok.bpe.32000.de",
        "newstest2014.tok.bpe.32000.en",
        "train.tok.clean.bpe.32000.de",
        "train.tok.clean.bpe.32000.en",
        "vocab.bpe.32000",
    ]
    codes = (out / "bpe.32000").read_text().splitlines()
    assert (codes[0], len(codes)) == ("#version: 0.2", 51)
    last = (out / "train.tok.clean.bpe.32000.en").read_text().splitlines()[-1]
    assert undo(last) == "It &apos;s &quot; quoted &quot; ?"
    vocabulary = read_vocabulary(out / "vocab.bpe.32000")
    english = undo((out / "newstest2014.tok.bpe.32000.en").read_text().splitlines()[0])
    assert english.replace(" .", ".") == (raw / "newstest2014.en").read_text().splitlines()[0]
    german = (out / "newstest2014.tok.bpe.32000.de").read_text().splitlines()[0]
    assert vocabulary.decode(vocabulary.encode(german)) == (raw / "newstest2014.de").read_text().splitlines()[0]


SUBTOKENS = ["<pad>_", "<EOS>_", *"abcdefgh", "ab", "abc_", "c_", "_", "\\", "u", ";", *"0123456789", " ", ", _"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("abc abcc", ["abc_", "ab", "c", "c_"]),
        ("abc, abc", ["abc_", ", _", "abc_"]),
        ("a_b", ["a", "_", "\\", "u", "_", "b", "_"]),
        ("aß", ["a", "\\", "2", "2", "3", ";", "_"]),
        ("", []),
    ],
)
def test_text_is_cut_into_the_longest_subtokens(text: str, expected: list[str]) -> None:
    subtokens = Subtokens(SUBTOKENS, 40)
    numbers = [SUBTOKENS.index(piece) + 1 for piece in expected]
    assert subtokens.encode(text) == [*numbers, END]
    assert subtokens.decode(subtokens.encode(text)) == text


OFFICIAL = Subtokens(make_dictionary(["Some text, to take characters from; 1.5 °C"], 60), 64)


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_subtokens_bring_any_text_back(text: str) -> None:
    numbers = OFFICIAL.encode(text)
    assert numbers[-1] == END
    assert END not in numbers[:-1]
    assert OFFICIAL.decode(numbers) == text


def test_marks_written_in_a_text_stay_text() -> None:
    assert OFFICIAL.decode(OFFICIAL.encode("<EOS>_ and <pad>_")) == "<EOS>_ and <pad>_"
    assert not {1, 2} & set(OFFICIAL.encode("<EOS>_ and <pad>_")[:-1])


def test_the_dictionary_file(tmp_path: Path) -> None:
    path = tmp_path / "dict.en.txt"
    path.write_text("".join(f"'{subtoken}'\n" for subtoken in SUBTOKENS))
    assert read_dictionary(path).size == 33_712
    assert read_dictionary(path).encode("abc") == [SUBTOKENS.index("abc_") + 1, END]
    with pytest.raises(EnvironmentUnfitError, match="the model has room for 15"):
        read_dictionary(path, 16)
    path.write_text("'<pad>_'\n'<EOS>_'\nabc\n")
    with pytest.raises(EnvironmentUnfitError, match=r"line 3 of .* is not a subtoken in single quotes"):
        read_dictionary(path)
    path.write_text("'a'\n'b'\n")
    with pytest.raises(EnvironmentUnfitError, match="does not begin with"):
        read_dictionary(path)


FOX = ("The quick brown fox jumped over the lazy dog", "The quick yellow fox jumps over the lazy dog")


def test_corpus_bleu_is_sacrebleus_with_its_signature() -> None:
    bleu = corpus_bleu([FOX[0], "A dog."], [FOX[1], "A dog."])
    assert bleu.signature.startswith("nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:2.")
    # Counted by hand; hypothesis and reference are equally long.
    assert bleu.score == pytest.approx(100 * (10 / 12 * 6 / 10 * 3 / 8 * 1 / 6) ** 0.25, abs=1e-6)
    assert corpus_bleu(["the dog"], ["The dog"]).score < 100
