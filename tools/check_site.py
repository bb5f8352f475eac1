"""Check a built site: every link leads somewhere, and no page loads anything from the network."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

# Attributes whose address a browser loads by itself, by tag. A link (<a href>) is loaded only when a reader follows it.
_LOADED = {
    "script": "src",
    "img": "src",
    "iframe": "src",
    "source": "src",
    "video": "src",
    "audio": "src",
    "embed": "src",
}
_LOADED_RELATIONS = {
    "stylesheet",
    "preconnect",
    "dns-prefetch",
    "preload",
    "prefetch",
    "modulepreload",
    "icon",
    "manifest",
}
_LOADED_IN_CSS = re.compile(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//[^)\"'\s]+")


@dataclass
class Page:
    """What one HTML page defines and uses."""

    anchors: set[str] = field(default_factory=set)
    links: list[str] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)


class _PageParser(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.page = Page()
        self._in_style = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self._in_style = tag == "style"
        self.page.anchors |= {values[name] for name in ("id", "name") if values.get(name)}
        if tag == "a" and "href" in values:
            self.page.links.append(values["href"])
        if tag == "link" and _LOADED_RELATIONS & set(values.get("rel", "").split()):
            self.page.loaded.append(values.get("href", ""))
        if _LOADED.get(tag) in values:
            self.page.loaded.append(values[_LOADED[tag]])
        if match := _LOADED_IN_CSS.search(values.get("style", "")):
            self.page.loaded.append(match[0])

    def handle_data(self, data: str) -> None:
        if self._in_style and (match := _LOADED_IN_CSS.search(data)):
            self.page.loaded.append(match[0])


def find_problems(site: Path) -> list[str]:
    """Broken links, missing anchors and assets from the network in all pages and style sheets below `site`."""
    pages = {path.resolve(): _parse(path) for path in sorted(site.rglob("*.html"))}
    problems = [] if pages else [f"{site} has no page"]
    for path, page in pages.items():
        problems += [f"{path.relative_to(site.resolve())}: {text}" for text in _page_problems(path, page, pages, site)]
    for path in sorted(site.rglob("*.css")):
        if match := _LOADED_IN_CSS.search(path.read_text("utf-8")):
            problems.append(f"{path.relative_to(site)}: loads {match[0]}")
    return problems


def _parse(path: Path) -> Page:
    parser = _PageParser()
    parser.feed(path.read_text("utf-8"))
    return parser.page


def _page_problems(path: Path, page: Page, pages: dict[Path, Page], site: Path) -> Iterator[str]:
    for address in page.loaded:
        if re.match(r"(?:https?:)?//|url\(|@import", address):
            yield f"loads {address}"
        elif not address.startswith("data:") and not _resolve(path, address, site).exists():
            yield f"loads {address}, which is not there"
    for address in page.links:
        parts = urlsplit(address)
        if parts.scheme or parts.netloc:
            continue
        target = _resolve(path, address, site)
        if not target.exists():
            yield f"links to {address}, which is not there"
        elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].anchors:
            yield f"links to {address}, whose page has no such anchor"


def _resolve(page: Path, address: str, site: Path) -> Path:
    """The file that an address on a page stands for."""
    name = unquote(urlsplit(address).path)
    if not name:
        return page
    target = (site / name.lstrip("/") if name.startswith("/") else page.parent / name).resolve()
    return target / "index.html" if target.is_dir() else target
