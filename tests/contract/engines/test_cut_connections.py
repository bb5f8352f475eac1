"""A network that cuts every connection after some data, as proxies and load balancers do."""

import hashlib
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests import CUT_RUNS, NIGHTLY
from tests.contract.engines.labs import EngineLab, install_commands, start_cluster
from tests.contract.local_runs import python
from tests.fakes.cutting_proxy import CuttingProxy

MOST = 1_500_000  # bytes of a connection
# Connects like the ssh beside it, and drops the connection after MOST bytes from there.
CUTTING_SSH = f"""#!{sys.executable}
import os, subprocess, sys
there = subprocess.Popen([os.path.join(os.path.dirname(__file__), "whole-ssh"), *sys.argv[1:]], stdout=subprocess.PIPE)
left = {MOST}
while left and (data := there.stdout.read1(min(left, 1 << 16))):
    os.write(1, data)
    left -= len(data)
if not left:
    there.kill()
    open(os.path.join(os.path.dirname(__file__), "cuts"), "a").write("cut\\n")
sys.exit(255 if not left else there.wait())
"""
SCRIPT = f"""
import hashlib, os, pathlib
noise = os.urandom({6 * MOST})
pathlib.Path(os.environ["MLBENCH_OUTPUT_DIR"], "noise").write_bytes(noise)
print(hashlib.sha256(noise).hexdigest())
for number in range(30_000):
    print("line", number, "." * 100)
"""


# By day, kubernetes/test_head_pod.py cuts the connections to a pod.
@pytest.fixture(params=["hosts", "kubernetes"] if NIGHTLY or CUT_RUNS else ["hosts"])
def lab(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[EngineLab]:
    """A client whose connections to the head are cut, and must have been at the end."""
    kind = str(request.param)
    with ExitStack() as stack:
        commands = install_commands(tmp_path / "commands")
        cluster = stack.enter_context(start_cluster(tmp_path / "pods")) if kind == "kubernetes" else {}
        for name, value in {**commands, **cluster}.items():
            monkeypatch.setenv(name, value)
        (tmp_path / "home").mkdir()
        if kind == "kubernetes":
            upstream = urlsplit(os.environ["LAB_CLUSTER"])
            proxy = CuttingProxy(str(upstream.hostname), int(upstream.port or 0), least=200_000, most=MOST)
            stack.enter_context(proxy)
            monkeypatch.setenv("LAB_CLUSTER", f"http://127.0.0.1:{proxy.port}")
        else:
            ssh = tmp_path / "commands" / "bin" / "ssh"
            ssh.rename(ssh.with_name("whole-ssh"))
            ssh.write_text(CUTTING_SSH)
            ssh.chmod(0o755)
        lab = EngineLab(kind, tmp_path / "home")
        yield lab
        lab.close()
        cuts = proxy.cuts if kind == "kubernetes" else len(ssh.with_name("cuts").read_text().splitlines())
        assert cuts >= 5


@pytest.mark.slow
@pytest.mark.parametrize("number", range(CUT_RUNS or 1))
def test_logs_and_results_arrive_whole(lab: EngineLab, number: int) -> None:
    run = lab.start(python(SCRIPT))
    assert lab.end(run).ended == "exited"
    assert lab.engine.head(run).fetch().complete
    noise = (run.folder / "output/rank-0/noise").read_bytes()
    first, *rest = (run.folder / "logs/rank-0.log").read_text().splitlines()
    assert first == hashlib.sha256(noise).hexdigest()
    assert rest == [f"line {number} {'.' * 100}" for number in range(30_000)]
