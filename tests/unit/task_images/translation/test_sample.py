"""The made-up German follows the grammar, checked by a parser with its own tables, in the documented mixture."""

import re
from collections import Counter

import pytest

from task_images.translation.sample import sample_pairs

COUNT = 2000
PAIRS = sample_pairs(COUNT, 3)

# The declension of a grammar book: article, ending of the adjective after it, by gender and case.
NOMINATIVE = {("der", "e", "m"), ("die", "e", "f"), ("das", "e", "n"), ("ein", "er", "m"), ("eine", "e", "f")}
NOMINATIVE |= {("ein", "es", "n")}
ACCUSATIVE = {("den", "en", "m"), ("die", "e", "f"), ("das", "e", "n"), ("einen", "en", "m"), ("eine", "e", "f")}
ACCUSATIVE |= {("ein", "es", "n")}
GENDERS = {
    "m": "Hund Mann Lehrer Arzt König Vogel Garten Tisch Stuhl Brief Zug Fluss Berg Baum Apfel Käse Freund",
    "f": "Katze Frau Königin Lampe Brücke Blume Flasche Stadt Straße Schule Tür",
    "n": "Kind Mädchen Pferd Haus Buch Bild Auto Brot Glas Dorf Fenster Schiff",
}
GENDER = {noun: gender for gender, nouns in GENDERS.items() for noun in nouns.split()}
ADJECTIVES = {
    *("alt", "jung", "klein", "groß", "rot", "grün", "blau", "weiß", "schwarz", "schön", "neu", "gut", "schlecht"),
    *("langsam", "schnell", "still", "laut", "warm", "kalt", "reich"),
}
TIMES = {
    "today": "heute", "tomorrow": "morgen", "often": "oft", "now": "jetzt", "never": "nie", "here": "hier",
}  # fmt: skip
OPENINGS = {
    "I believe that ": "Ich glaube, dass ",
    "We know that ": "Wir wissen, dass ",
    "She says that ": "Sie sagt, dass ",
}
CONJUNCTIONS = {" because ": ", weil ", " if ": ", wenn ", " while ": ", während "}
WORDS = """
sees sieht seen gesehen, finds findet found gefunden, buys kauft bought gekauft, sells verkauft sold verkauft,
paints malt painted gemalt, loves liebt loved geliebt, knows kennt known gekannt, hears hört heard gehört,
carries trägt carried getragen, brings bringt brought gebracht, visits besucht visited besucht,
needs braucht needed gebraucht, shows zeigt shown gezeigt, seeks sucht sought gesucht,
forgets vergisst forgotten vergessen, holds hält held gehalten
"""
VERBS = {english: german for english, german, _, _ in map(str.split, WORDS.split(","))}
PARTICIPLES = {english: german for _, _, english, german in map(str.split, WORDS.split(","))}
PHRASE = r"(?:\w+ (?:\w+ )?[A-ZÄÖÜ]\w+)"


def check_phrase(text: str, forms: set[tuple[str, str, str]]) -> None:
    article, *adjective, noun = text.split()
    gender = GENDER[noun]
    if not adjective:
        assert any((article, gender) == (form[0], form[2]) for form in forms), text
        return
    stem = next(ending for ending in ("en", "er", "es", "e") if adjective[0].removesuffix(ending) in ADJECTIVES)
    assert (article, stem, gender) in forms, text


def check_english(text: str) -> None:
    """A phrase such as "an old dog"."""
    article, word, *_ = text.split()
    assert article == "the" or (article == "an") is (word[0] in "aeiou"), text


def split_english(clause: str) -> tuple[str | None, bool, str]:
    """Time, whether it is in the perfect tense, and the verb."""
    first, _, rest = clause.partition(" ")
    time, clause = (first, rest) if first in TIMES else (None, clause)
    match = re.fullmatch(r"((?:the|an?) [\w ]+?) (has )?(\w+) ((?:the|an?) [\w ]+)", clause)
    assert match, clause
    assert match[3] in (PARTICIPLES if match[2] else VERBS), clause
    check_english(match[1])
    check_english(match[4])
    return time, bool(match[2]), match[3]


def check_main(english: str, german: str) -> Counter[str]:
    time, perfect, verb = split_english(english)
    first, last = ("hat", f" {PARTICIPLES[verb]}") if perfect else (VERBS[verb], "")
    pattern = rf"{TIMES[time]} {first} ({PHRASE}) ({PHRASE}){last}" if time else rf"({PHRASE}) {first} ({PHRASE}){last}"
    match = re.fullmatch(pattern, german)
    assert match, (english, german)
    check_phrase(match[1], NOMINATIVE)
    check_phrase(match[2], ACCUSATIVE)
    return Counter({"time": bool(time), "perfect": perfect, "main": 1})


def check_subordinate(english: str, german: str) -> Counter[str]:
    """The verb is at the end."""
    time, perfect, verb = split_english(english)
    assert time is None
    last = f"{PARTICIPLES[verb]} hat" if perfect else VERBS[verb]
    match = re.fullmatch(rf"({PHRASE}) ({PHRASE}) {last}", german)
    assert match, (english, german)
    check_phrase(match[1], NOMINATIVE)
    check_phrase(match[2], ACCUSATIVE)
    return Counter({"late perfect": perfect, "subordinate": 1})


def lower(text: str) -> str:
    """A sentence without its full stop and with a small first letter."""
    assert text.endswith(".")
    return f"{text[0].lower()}{text[1:-1]}"


def check_sentence(english: str, german: str) -> Counter[str]:
    for opening, there in OPENINGS.items():
        if english.startswith(opening):
            assert german.startswith(there), german
            return check_subordinate(english[len(opening) : -1], german[len(there) : -1]) + Counter(["opening"])
    english, german = lower(english), lower(german)
    for word, there in CONJUNCTIONS.items():
        if word in english:
            (left, right), (before, behind) = english.split(word), german.split(there)
            return check_main(left, before) + check_subordinate(right, behind) + Counter(["conjunction"])
    return check_main(english, german)


def test_every_sentence_is_correct_german_for_its_english_in_the_documented_mixture() -> None:
    counts: Counter[str] = sum((check_sentence(*pair) for pair in PAIRS), Counter())
    shares = {
        "opening": counts["opening"] / COUNT,
        "conjunction": counts["conjunction"] / COUNT,
        "time": counts["time"] / counts["main"],
        "perfect": counts["perfect"] / counts["main"],
        "late perfect": counts["late perfect"] / counts["subordinate"],
    }
    # Three standard deviations of the smallest sample, 800 subordinate clauses, are 0.05.
    wanted = {"opening": 0.2, "conjunction": 0.2, "time": 0.5, "perfect": 0.4, "late perfect": 0.4}
    assert shares == pytest.approx(wanted, abs=0.05)


def test_half_of_the_nouns_have_an_adjective_and_half_the_definite_article() -> None:
    text = " ".join(german for _, german in PAIRS).replace(".", "").replace(",", "").split()
    nouns = sum(word in GENDER for word in text)
    adjectives = sum(any(word.removesuffix(end) in ADJECTIVES for end in ("e", "en", "er", "es")) for word in text)
    assert adjectives / nouns == pytest.approx(0.5, abs=0.03)
    definite = sum(word.lower() in ("der", "die", "das", "den") for word in text)
    assert definite / nouns == pytest.approx(0.5, abs=0.03)
    assert set(GENDER) <= set(text)
