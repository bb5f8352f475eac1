"""Wikitext as a reader sees it, without what is no sentence."""

import pytest

from task_images.bert_pretraining.markup import plain_paragraphs

ARTICLE = """{{Short description|Language {{nowrap|of Malta}}}}
{| class="wikitable"
! a !! {{flag|Malta}}
|-
| b || c
|}
[[File:Map.svg|thumb|A map of [[Malta]], with [https://example.org a source]]]
'''Maltese''' ({{lang|mt|Malti}}) is a [[Semitic languages|Semitic language]] &amp; the [[official language]] of
[[Malta]].<ref name="a">{{cite web|url=https://example.org}}</ref><ref name="b" /> It
has <small>524,000</small> users.<!--
a note -->

== History ==
* an item
It is described in ''[[Star Trek: Voyager]]'' and by [https://example.org a linguist].<math>x</math>
[[Category:Languages of Malta]]
[[mt:Lingwa Maltija]]
__NOTOC__
"""


def test_an_article_becomes_its_paragraphs() -> None:
    assert plain_paragraphs(ARTICLE) == [
        "Maltese is a Semitic language & the official language of",
        "Malta. It",
        "has 524,000 users.",
        "It is described in Star Trek: Voyager and by a linguist.",
    ]


@pytest.mark.parametrize("markup", ["", "{{", "[[File:a|", "{|\n|", "<ref>", "'''''", "[[a|b|c]]]]"])
def test_broken_markup_is_no_error(markup: str) -> None:
    assert all(isinstance(line, str) for line in plain_paragraphs(markup))


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("a () b", "a b"),
        ("a (,; ) b", "a b"),
        ("a (, ;) b", "a b"),
        ("a ( , , ) b", "a b"),
        ("a (b, c) d", "a (b, c) d"),
    ],
)
def test_brackets_that_templates_left_hollow_go(text: str, plain: str) -> None:
    assert plain_paragraphs(text) == [plain]


def test_a_hostile_article_takes_no_quadratic_time() -> None:
    assert plain_paragraphs("[[" * 20_000 + "{{" * 20_000) is not None
