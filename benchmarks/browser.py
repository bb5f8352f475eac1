"""The judge of results sites in Chromium: cold start, an archive, one with 1,000,000 log lines, and bytes.

    python -m benchmarks.browser [--lines 1000000] ARCHIVE...

The archives go to a site on this machine, without a network's latency; its worker judges them as after a click on
"Verify here". Prints one JSON line; the exit code is 1 if an answer is not that of this Python, word by word.
"""

import argparse
import json
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from verify import START, write_run

from mlbench_cli.model.run import Ending, Observation, WorkerState
from mlbench_cli.results.archive.pack import pack
from mlbench_cli.results.archive.seal import seal
from mlbench_cli.results.site.build import SiteOptions, build_site
from mlbench_cli.results.site.judge_here import check
from tests.browser import open_browser
from tests.pyodide import find_pyodide

PATIENCE = 600.0  # seconds for an answer
# Asks the worker of a site, and returns its answer, or null as long as there is none.
ASK = """
const [number, judge] = arguments;
if (!window.judging) {
  window.answers = {};
  window.judging = new Worker('/assets/judge-worker.js', { type: 'module' });
  window.judging.onmessage = ({ data }) => { if (!data.progress) window.answers[data.id] = data; };
}
if (!(number in window.answers)) {
  window.answers[number] = null;
  window.judging.postMessage({ id: number, url: `/asked/${number}.zip`, judge, root: `${location.origin}/` });
}
return window.answers[number];
"""


class Quiet(SimpleHTTPRequestHandler):
    """Serves files without a line per request."""

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def serve(folder: Path) -> Iterator[str]:
    """The address of the files in a folder."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def judge_in_browser(shown: Path, asked: Sequence[Path], place: Path) -> Iterator[dict[str, Any]]:
    """The answers for archives, by the code that a site with the archive `shown` ships. `waited`: seconds for each,
    and `different`: whether this Python answers otherwise."""
    site = place / "site"
    build_site([shown], site, SiteOptions(pyodide=find_pyodide()))
    judge = json.loads((site / "index.json").read_bytes())["judge"]
    (site / "asked").mkdir()
    with serve(site) as address, open_browser() as browser:
        browser.open(f"{address}/index.html")
        for number, path in enumerate(asked):
            shutil.copyfile(path, site / "asked" / f"{number}.zip")
            begun = time.perf_counter()
            answer = browser.wait_for(ASK, number, judge, seconds=PATIENCE)
            waited = time.perf_counter() - begun
            here = json.loads(check(str(path)))
            is_different = {name: answer.get(name) for name in here} != here
            yield {**answer, "waited": waited, "different": is_different, "here": here}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("archives", nargs="+", type=Path, metavar="ARCHIVE")
    parser.add_argument("--lines", type=int, default=1_000_000, help="of the log of a long archive")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        run = write_run(place / "run", given.lines)
        state = WorkerState(0, "succeeded", exit_code=0, started=START, finished=START + 100)
        seal(run, Observation(START + 100, (state,), (), Ending.EXITED))
        pack(run.folder, place / "long.zip")
        answers = list(judge_in_browser(given.archives[0], [*given.archives, place / "long.zip"], place))
        first, *further, last = answers
        sizes = {
            kind: sum(path.stat().st_size for path in (place / "site" / kind).rglob("*") if path.is_file())
            for kind in ("pyodide", "judges", "assets")
        }
    document = {
        "cold_start_seconds": round(first["waited"] - first["judged"], 2),
        "seconds_for_an_archive": [round(answer["judged"], 2) for answer in (first, *further)],
        "lines": given.lines,
        "seconds_for_lines": round(last["judged"], 2),
        "bytes": sizes,
        "python": first["python"],
        "different": [answer["id"] for answer in answers if answer["different"]],
    }
    print(json.dumps(document))
    return int(bool(document["different"]))


if __name__ == "__main__":
    sys.exit(main())
