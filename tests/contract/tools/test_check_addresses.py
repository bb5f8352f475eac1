"""The check of the data sets' addresses, against a server on this machine."""

import hashlib

from task_images.fetch import Archive
from tests.fakes.file_server import FileServer, serving
from tools.check_addresses import all_archives, check

CONTENT = b"the content of a data set\n" * 100
DIGEST = f"md5:{hashlib.md5(CONTENT).hexdigest()}"


def problems(server: FileServer, size: int = len(CONTENT), digest: str = DIGEST, limit: int = 10_000) -> list[str]:
    with serving(server):
        archive = Archive("a.zip", server.url, size, digest, mirrors=(server.url,))
        return [problem for _, problem in check(archive, limit)]


def test_a_right_file_is_asked_for_once() -> None:
    assert problems(FileServer(CONTENT)) == [""]


def test_a_mirror_is_asked_where_the_first_address_fails() -> None:
    found = problems(FileServer(CONTENT, refuse_with=[404]))
    assert found[0].startswith("no answer: HTTP Error 404") or "Not Found" in found[0]
    assert found[1:] == [""]


def test_other_sizes_and_digests_are_problems() -> None:
    assert problems(FileServer(CONTENT), size=7)[0] == f"{len(CONTENT)} bytes instead of 7"
    assert "instead of" in problems(FileServer(CONTENT), digest=f"md5:{'0' * 32}")[0]
    assert problems(FileServer(CONTENT), digest=f"md5:{'0' * 32}", limit=10) == [""]


def test_every_task_with_files_is_in_the_list() -> None:
    names = {archive.name for archive in all_archives()}
    assert len(names) == len(all_archives()) >= 19
