"""A small synthetic parallel corpus with structure to learn: English clauses from a grammar, and their German
translations.

The German needs more than a dictionary: three genders and two cases of articles and adjectives, and the verb in second
position, at the end of subordinate clauses, and in two parts in the perfect tense. Sentences are drawn at random; no
sentence of the test set is in the training set. Because the text is generated, results must say `synthetic`.
"""

import random
from pathlib import Path
from typing import NamedTuple


class _Noun(NamedTuple):
    english: str
    german: str
    gender: str


class _Verb(NamedTuple):
    english: str  # he ...
    past: str  # he has ...
    german: str  # er ...
    participle: str  # er hat ...


_NOUNS = [
    _Noun(*line.split())
    for line in """
    dog Hund m|cat Katze f|child Kind n|man Mann m|woman Frau f|girl Mädchen n|teacher Lehrer m|doctor Arzt m
    king König m|queen Königin f|horse Pferd n|bird Vogel m|house Haus n|garden Garten m|table Tisch m|chair Stuhl m
    lamp Lampe f|book Buch n|letter Brief m|picture Bild n|car Auto n|train Zug m|bridge Brücke f|river Fluss m
    mountain Berg m|tree Baum m|flower Blume f|apple Apfel m|bread Brot n|cheese Käse m|bottle Flasche f|glass Glas n
    city Stadt f|village Dorf n|street Straße f|school Schule f|door Tür f|window Fenster n|friend Freund m
    ship Schiff n
    """.replace("\n", "|").split("|")
    if line.strip()
]
_VERBS = [
    _Verb(*line.split())
    for line in """
    sees seen sieht gesehen|finds found findet gefunden|buys bought kauft gekauft|sells sold verkauft verkauft
    paints painted malt gemalt|loves loved liebt geliebt|knows known kennt gekannt|hears heard hört gehört
    carries carried trägt getragen|brings brought bringt gebracht|visits visited besucht besucht
    needs needed braucht gebraucht
    shows shown zeigt gezeigt|seeks sought sucht gesucht|forgets forgotten vergisst vergessen|holds held hält gehalten
    """.replace("\n", "|").split("|")
    if line.strip()
]
_ADJECTIVES = [
    tuple(line.split())
    for line in """
    old alt|young jung|small klein|big groß|red rot|green grün|blue blau|white weiß|black schwarz|beautiful schön
    new neu|good gut|bad schlecht|slow langsam|fast schnell|quiet still|loud laut|warm warm|cold kalt|rich reich
    """.replace("\n", "|").split("|")
    if line.strip()
]
_TIMES = [
    ("today", "heute"),
    ("tomorrow", "morgen"),
    ("often", "oft"),
    ("now", "jetzt"),
    ("never", "nie"),
    ("here", "hier"),
]
_OPENINGS = [
    ("I believe that", "ich glaube, dass"),
    ("we know that", "wir wissen, dass"),
    ("she says that", "sie sagt, dass"),
]
_CONJUNCTIONS = [("because", "weil"), ("if", "wenn"), ("while", "während")]
_ARTICLES = {
    ("the", "subject"): {"m": "der", "f": "die", "n": "das"},
    ("the", "object"): {"m": "den", "f": "die", "n": "das"},
    ("a", "subject"): {"m": "ein", "f": "eine", "n": "ein"},
    ("a", "object"): {"m": "einen", "f": "eine", "n": "ein"},
}
_ENDINGS = {
    ("the", "subject"): {"m": "e", "f": "e", "n": "e"},
    ("the", "object"): {"m": "en", "f": "e", "n": "e"},
    ("a", "subject"): {"m": "er", "f": "e", "n": "es"},
    ("a", "object"): {"m": "en", "f": "e", "n": "es"},
}


def write_sample(folder: Path, train: int, test: int, seed: int) -> None:
    """Write train.{en,de} and test.{en,de} with `train` and `test` pairs of untokenized sentences."""
    pairs = sample_pairs(train + test, seed)
    for name, part in (("test", pairs[:test]), ("train", pairs[test:])):
        for language, side in (("en", 0), ("de", 1)):
            text = "".join(f"{pair[side]}\n" for pair in part)
            (folder / f"{name}.{language}").write_text(text, encoding="utf-8")


def sample_pairs(count: int, seed: int) -> list[tuple[str, str]]:
    """`count` distinct pairs (English, German), determined by the seed."""
    chance = random.Random(f"sentences {seed}")
    pairs: dict[str, str] = {}
    while len(pairs) < count:
        english, german = _sentence(chance)
        pairs[_finish_sentence(english)] = _finish_sentence(german)
    return list(pairs.items())


def _sentence(chance: random.Random) -> tuple[str, str]:
    kind = chance.random()
    if kind < 0.6:
        return _main_clause(chance)
    if kind < 0.8:
        english, german = chance.choice(_OPENINGS)
        clause = _subordinate_clause(chance)
        return f"{english} {clause[0]}", f"{german} {clause[1]}"
    first, (english, german), second = _main_clause(chance), chance.choice(_CONJUNCTIONS), _subordinate_clause(chance)
    return f"{first[0]} {english} {second[0]}", f"{first[1]}, {german} {second[1]}"


def _main_clause(chance: random.Random) -> tuple[str, str]:
    subject, verb, object_ = _phrase(chance, "subject"), chance.choice(_VERBS), _phrase(chance, "object")
    time, perfect = chance.choice(_TIMES), chance.random() < 0.4
    english = f"has {verb.past}" if perfect else verb.english
    first, last = ("hat", f" {verb.participle}") if perfect else (verb.german, "")
    if chance.random() < 0.5:
        return f"{subject[0]} {english} {object_[0]}", f"{subject[1]} {first} {object_[1]}{last}"
    # After an initial adverb of time the verb stays in second position, so the subject follows it.
    return (
        f"{time[0]} {subject[0]} {english} {object_[0]}",
        f"{time[1]} {first} {subject[1]} {object_[1]}{last}",
    )


def _subordinate_clause(chance: random.Random) -> tuple[str, str]:
    subject, verb, object_ = _phrase(chance, "subject"), chance.choice(_VERBS), _phrase(chance, "object")
    if chance.random() < 0.4:
        return f"{subject[0]} has {verb.past} {object_[0]}", f"{subject[1]} {object_[1]} {verb.participle} hat"
    return f"{subject[0]} {verb.english} {object_[0]}", f"{subject[1]} {object_[1]} {verb.german}"


def _phrase(chance: random.Random, case: str) -> tuple[str, str]:
    noun, article = chance.choice(_NOUNS), chance.choice(("the", "a"))
    german_article = _ARTICLES[article, case][noun.gender]
    english, german = noun.english, noun.german
    if chance.random() < 0.5:
        adjective = chance.choice(_ADJECTIVES)
        english = f"{adjective[0]} {english}"
        german = f"{adjective[1]}{_ENDINGS[article, case][noun.gender]} {german}"
    if article == "a" and english[0] in "aeiou":
        return f"an {english}", f"{german_article} {german}"
    return f"{article} {english}", f"{german_article} {german}"


def _finish_sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."
