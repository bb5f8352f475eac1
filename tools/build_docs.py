"""Build the documentation: `python -m tools.build_docs`, or `make docs`.

The site in build/site consists of the pages in docs/, of the reference that tools/reference.py generates from the code,
and of CONTRIBUTING.md and CHANGELOG.md. Warnings, broken links and assets from the network are errors.
"""

import argparse
import re
import shutil
import subprocess
import sys
from pathlib import Path

from mlbench_cli.results.site.build import SiteOptions
from mlbench_cli.results.site.build import build_site as build_results
from tools.check_site import find_problems
from tools.reference import StaleReferenceError, fold, generate_pages

ROOT = Path(__file__).parents[1]
COPIED = {
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "results/README.md": "results.md",
}
FOLDED = (
    "changelog.md",
    "development/clouds-assumptions.md",
    "development/figures.md",
    "reference/archive.md",
)  # too long to scroll through
FOLDED_LINES = 15  # sections up to this length stay open
PUBLISHED = "published"  # the results site, beside the pages


def collect_sources(folder: Path) -> None:
    """Write all pages of the site, as Markdown, and the generator's configuration below `folder`."""
    source = folder / "docs"
    shutil.copytree(ROOT / "docs", source, ignore=shutil.ignore_patterns("*.toml"))
    for name, text in generate_pages().items():
        page = source / "reference" / name
        introduction = page.read_text("utf-8") + "\n" if page.is_file() else ""
        page.write_text(introduction + text, "utf-8")
    for name, page_name in COPIED.items():
        text = (ROOT / name).read_text("utf-8")
        (source / page_name).write_text(adapt_links(text), "utf-8")
    for name in FOLDED:
        (source / name).write_text(fold_sections((source / name).read_text("utf-8")), "utf-8")
    with open(source / "results.md", "a", encoding="utf-8") as results:
        results.write(f'\n<p><a href="{PUBLISHED}/index.html">Open the results</a></p>\n')
    shutil.copy(ROOT / "docs" / "zensical.toml", folder)


def fold_sections(text: str) -> str:
    """A page whose long sections are closed below their headings until a reader opens them, or finds a word in them."""
    parts = re.split(r"^(##+ .*)$", text, flags=re.MULTILINE)
    for index in range(2, len(parts), 2):
        body = parts[index].strip()
        if body.count("\n") >= FOLDED_LINES:
            items, rows = (len(re.findall(form, body, re.MULTILINE)) for form in (r"^- ", r"^\| (?!-)"))
            title = f"{rows - 1} rows" if rows > items else f"{items} changes"
            parts[index] = f"\n\n{fold(title, [body])}\n\n"
    return "".join(parts)


def adapt_links(text: str) -> str:
    """Links of a page at the top of the repository as links of a page at the top of docs/."""
    for name, page_name in COPIED.items():
        text = text.replace(f"]({name})", f"]({page_name})")
    return re.sub(r"\]\(docs/", "](", text)


def build_site(folder: Path) -> Path:
    """Build the site below `folder`, which is emptied first, and return its folder. Raises CalledProcessError."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    collect_sources(folder)
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean", "--config-file", "zensical.toml"]
    subprocess.run(command, cwd=folder, check=True)
    # An archive that today's rules cannot prove is listed as refused; tests say which those are.
    build_results([ROOT / "results" / "archives"], folder / "site" / PUBLISHED, SiteOptions(leave_out=True))
    return folder / "site"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "build", help="default: build")
    folder: Path = parser.parse_args(argv).folder.absolute()
    try:
        site = build_site(folder)
    except (StaleReferenceError, subprocess.CalledProcessError) as error:
        print(error, file=sys.stderr)
        return 1
    problems = find_problems(site)
    print(*problems, sep="\n", file=sys.stderr, end="\n" if problems else "")
    if not problems:
        print(f"Open {site / 'index.html'}; for the search: {sys.executable} -m http.server --directory {site}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
