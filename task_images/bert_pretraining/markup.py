"""Articles of a Wikipedia dump as plain text: paragraphs only, as BERT's authors kept them.

Tables, lists, headings, references, templates, pictures and categories are left out. Standard library only; the dump is
read as a stream, so it needs little memory.
"""

import bz2
import html
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator
from pathlib import Path

from task_images.contract import EnvironmentUnfitError

# Elements whose content is no text of the article.
_DROPPED = "ref|math|gallery|timeline|score|syntaxhighlight|source|pre|code|chem|hiero|imagemap|table"
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_EMPTY_ELEMENT = re.compile(rf"<(?:{_DROPPED})\b[^<>]*/>", re.IGNORECASE)
_ELEMENT = re.compile(rf"<({_DROPPED})\b[^<>]*>.*?</\1\s*>", re.IGNORECASE | re.DOTALL)
_TAG = re.compile(r"</?[a-zA-Z][^<>]*>")
_BRACES = re.compile(r"\{\{[^{}]*\}\}|\{\|[^{}]*?\|\}", re.DOTALL)  # the innermost ones
_LINK = re.compile(r"\[\[([^\[\]]*)\]\]")
_ADDRESS = re.compile(r"\[(?:https?:)?//\S+ ?([^\[\]]*)\]")
_QUOTES = re.compile(r"'{2,}")
_MAGIC = re.compile(r"__[A-Z]+__")
_HOLLOW = re.compile(r"\([\s,;]*\)")
_NO_PARAGRAPH = ("=", "*", "#", ":", ";", "|", "!", "{", "}", "[[")


def read_articles(path: Path, reach: Callable[[int], None]) -> Iterator[list[str]]:
    """The paragraphs of each article of the dump; pages that are redirects, talk or empty are left out.

    `reach` is told how many bytes of the file were read. Raises EnvironmentUnfitError for a file that is no dump.
    """
    try:
        with open(path, "rb") as raw, bz2.open(raw) as file:
            pages = ElementTree.iterparse(file, events=("start", "end"))
            _, root = next(pages)
            for event, page in pages:
                if event == "start" or page.tag.rpartition("}")[2] != "page":
                    continue
                values = {part.tag.rpartition("}")[2]: part.text or "" for part in page.iter()}
                root.clear()  # else all pages stay in memory
                reach(raw.tell())
                is_article = values.get("ns") == "0" and "redirect" not in values
                if is_article and (paragraphs := plain_paragraphs(values.get("text", ""))):
                    yield paragraphs
    except (OSError, EOFError, ElementTree.ParseError, StopIteration) as error:
        raise EnvironmentUnfitError(
            f"{path} is not a complete dump of Wikipedia: {error}", "Delete the file and prepare the data again."
        ) from None


def plain_paragraphs(markup: str) -> list[str]:
    """The paragraphs of an article's wikitext, as plain text."""
    text = _ELEMENT.sub("", _EMPTY_ELEMENT.sub("", _COMMENT.sub("", markup)))
    text = _ADDRESS.sub(r"\1", _repeat(_BRACES, "", text))
    text = _repeat(_LINK, _link_text, text)
    text = _MAGIC.sub("", _QUOTES.sub("", _TAG.sub("", text)))
    lines = (" ".join(html.unescape(line).split()) for line in text.splitlines())
    return [_HOLLOW.sub("", line).replace("  ", " ") for line in lines if line and not line.startswith(_NO_PARAGRAPH)]


def _repeat(pattern: re.Pattern[str], replacement: str | Callable[[re.Match[str]], str], text: str) -> str:
    """Replace the innermost matches until there are none."""
    while (changed := pattern.sub(replacement, text)) != text:
        text = changed
    return text


def _link_text(match: re.Match[str]) -> str:
    """What a reader sees of a link; nothing of pictures, categories and links to other languages."""
    target, *shown = match[1].split("|")
    prefix, colon, name = target.partition(":")
    if colon and prefix and " " not in prefix and not name.startswith(" "):
        return ""
    return (shown[-1] if shown else target).lstrip(":")
