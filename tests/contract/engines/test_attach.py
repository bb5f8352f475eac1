"""What a person meets when attaching machines: names of folders, lines of --setup, an ssh configuration, one host under
two names."""

import json
import os
import venv
from pathlib import Path

import pytest

from mlbench_cli.storage.store import Store
from tests.contract import clients
from tests.contract.engines.labs import install_commands
from tests.fakes import slurm


class Shell:
    """Types commands in a folder, with Slurm's commands and an ssh of this machine."""

    def __init__(self, folder: Path) -> None:
        self.environment = {
            **os.environ,
            **install_commands(folder / "commands"),
            "HOME": str(folder),
            "MLBENCH_HOME": str(folder / "home"),
            "MLBENCH_MACHINE_LOCK": "none",
        }
        nodes = [{"names": "n1", "count": 1, "state": "idle", "partition": "debug"}]
        Path(self.environment["SLURM_CONF"]).with_name("nodes.json").write_text(json.dumps(nodes))
        self.folder = folder
        venv.create(folder / "bare", symlinks=True)  # probed in no time: it has no torch
        self.python = str(folder / "bare/bin/python")

    def __call__(self, *words: str, code: int = 0, where: Path | None = None) -> str:
        done = clients.finish(*words, environment=self.environment, cwd=where or self.folder)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    return Shell(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["my dir", "run%j"])
def test_a_folder_that_slurm_cannot_name_is_refused_with_the_character(shell: Shell, name: str) -> None:
    said = shell("attach-slurm", "s", "--shared", f"/tmp/{name}", "--python", shell.python, "--no-probe", code=2)
    assert "which Slurm cannot have in the names of a job's files" in said


@pytest.mark.slow
def test_a_folder_that_cannot_be_written_is_refused_even_without_a_probe(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    python = ("--python", shell.python)
    for place in ("file", "file/below"):
        said = shell("attach-slurm", "s", "--shared", str(tmp_path / place), *python, "--no-probe", code=2)
        assert "Cannot create the folder" in said
        assert "--shared DIR" in said
        said = shell("attach-hosts", "h", "--hosts", "m0", "--dir", str(tmp_path / place), *python, code=2)
        assert "Cannot create the folder" in said


def test_a_folder_that_is_gone_since_is_said_with_a_remedy(shell: Shell, tmp_path: Path) -> None:
    shell("attach-slurm", "s", "--shared", str(tmp_path / "far"), "--python", shell.python, "--no-probe")
    (tmp_path / "far").touch()
    said = shell("run", "r", "1", "--command", "true", "--yes", code=2)
    assert "attach the cluster with another folder" in said


@pytest.mark.slow
def test_other_folders_run_and_the_timeout_does_not_count_the_queue(shell: Shell, tmp_path: Path) -> None:
    folder = tmp_path / "ünï$HOME;b(c)*&!=?"
    shell("attach-slurm", "s", "--shared", str(folder), "--python", shell.python, "--no-probe")
    said = shell("run", "r", "1", "--command", "echo hi", "--yes")
    assert "Timeout 4 h from the start of its job; Slurm's queue has none." in said
    assert shell("logs", "r-1") == "hi\n"


@pytest.mark.slow
def test_a_container_that_slurm_cannot_start_is_told_in_the_words_of_its_plugin(shell: Shell, tmp_path: Path) -> None:
    shell("attach-slurm", "s", "--shared", str(tmp_path / "far"), "--python", shell.python, "--no-probe")
    refusal = "pyxis:     [ERROR] URL https://nvcr.io/proxy_auth returned error code: 401 Unauthorized"
    find_log = "for word; do case $word in --output=*) log=${word#--output=};; esac; done"
    srun = Path(shell.environment["SLURM_CONF"]).parents[1] / "bin/srun"
    srun.write_text(f"#!/bin/sh\n{find_log}\necho 'slurmstepd: error: {refusal}' >\"$log\"\nexit 1\n")
    assert refusal in shell("run", "r", "1", "--command", "echo hi", "--yes", code=6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lines", "quoted"),
    [
        ("module load pytorch/2.4", "module load pytorch/2.4"),
        ("set -e\nexpr 1 = 2", "exit code 1 from: expr 1 = 2"),
        ("module load pytorch/2.4 || exit 3", "exit code 3 from: a line that ended the shell"),
    ],
)
def test_a_line_of_setup_that_fails_is_quoted_when_attaching_and_before_a_run(
    shell: Shell, tmp_path: Path, lines: str, quoted: str
) -> None:
    (tmp_path / "setup.sh").write_text(f"{lines}\n")
    where = ("--shared", str(tmp_path / "far"), "--python", shell.python, "--setup", "setup.sh")
    assert quoted in shell("attach-slurm", "s", *where, code=2)
    shell("attach-slurm", "s", *where, "--no-probe")
    said = shell("run", "r", "1", "--command", "echo never", "--yes", code=6)
    assert quoted in said
    assert "never\n" not in said


@pytest.mark.slow
def test_lines_of_setup_hold_for_the_probe_and_the_ranks_alike(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "setup.sh").write_text('hello() { export GREETING="hello$*"; }\nhello "$@"\nset -e\nreturn\nfalse\n')
    shell("attach-slurm", "s", "--shared", str(tmp_path / "far"), "--python", shell.python, "--setup", "setup.sh")
    shell("run", "r", "1", "--command", "sh -c 'echo $GREETING'", "--yes")
    assert shell("logs", "r-1") == "hello\n"


@pytest.mark.slow
def test_a_script_of_this_folder_is_named_with_its_path(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('hi')\n")
    shell("attach-slurm", "s", "--shared", str(tmp_path / "far"), "--python", shell.python, "--no-probe")
    assert f"e.g. {tmp_path}/train.py" in shell("run", "r", "1", "--command", "python train.py", "--yes", code=7)
    said = shell("run", "q", "1", "--command", f"python {tmp_path}/train.py", "--yes")
    assert "name scripts by their paths" not in said
    assert shell("logs", "q-1") == "hi\n"


def test_what_shells_and_interpreters_print_is_no_answer_of_a_node(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / ".bash_profile").write_text('echo "| w | e | l | c |"; printf "ome: "\n')
    (tmp_path / "chatty").write_text(f'#!/bin/sh\necho "loaded | python"\nexec {shell.python} "$@"\n')
    (tmp_path / "chatty").chmod(0o755)
    where = ("--shared", str(tmp_path / "far"), "--python", str(tmp_path / "chatty"))
    (node,) = json.loads(shell("attach-slurm", "s", *where, "-o", "json"))["nodes"]
    assert (node["node"], node["sees_folder"], node["torch"]) == ("n1.0", True, "")
    assert node["python"].startswith("3.")


def test_a_site_that_wants_an_account_or_a_gpu_is_asked_with_one_or_understood(shell: Shell, tmp_path: Path) -> None:
    def attach(*words: str, code: int = 0, **node: str) -> str:
        nodes = [{"names": "g[1-2]", "count": 2, "state": "idle", "partition": "debug", **node}]
        Path(shell.environment["SLURM_CONF"]).with_name("nodes.json").write_text(json.dumps(nodes))
        where = ("--shared", str(tmp_path / "far"), "--python", shell.python)
        return shell("attach-slurm", "s", *where, *words, code=code)

    assert "does not permit the job" in attach(wants="account", code=3)
    assert "not probed" not in attach(wants="gres", gres="gpu:a100:no_consume:4(S:0-1)")
    assert "add --no-probe" in attach(wants="gres", code=5)
    assert "not probed" not in attach("--constraint", "ib", wants="constraint", features="ib")


def test_a_partition_that_slurm_hides_can_be_chosen(shell: Shell, tmp_path: Path) -> None:
    """Those with Hidden=YES, and those of other groups, are listed only by sinfo -a."""
    kinds = ({"names": "n1", "partition": "debug"}, {"names": "g1", "partition": "project", "hidden": True})
    nodes = [{"count": 1, "state": "idle", **kind} for kind in kinds]
    Path(shell.environment["SLURM_CONF"]).with_name("nodes.json").write_text(json.dumps(nodes))
    where = ("--shared", str(tmp_path / "far"), "--python", shell.python)
    assert "partition project with 1 node" in shell("attach-slurm", "s", *where, "--partition", "project")


def test_slurm_is_found_where_only_login_shells_have_it(shell: Shell, tmp_path: Path) -> None:
    commands = Path(shell.environment["SLURM_CONF"]).parents[1] / "bin"
    (tmp_path / "tools").mkdir()
    for tool in Path("/usr/bin").iterdir():
        if tool.name not in slurm.COMMANDS:
            (tmp_path / "tools" / tool.name).symlink_to(tool)
    configuration = shell.environment.pop("SLURM_CONF")
    (tmp_path / ".bash_profile").write_text(
        f'echo welcome\nexport PATH="{commands}:$PATH" SLURM_CONF="{configuration}"\n'
    )
    shell.environment["PATH"] = str(tmp_path / "tools")
    shell("attach-slurm", "s", "--shared", str(tmp_path / "far"), "--python", shell.python)
    shell("run", "r", "1", "--command", "echo hi", "--yes")
    assert shell("logs", "r-1") == "hi\n"


def test_a_login_node_need_not_have_the_python_of_the_nodes(shell: Shell, tmp_path: Path) -> None:
    where = ("--login", "m0", "--shared", str(tmp_path / "far"), "--no-probe")
    shell("attach-slurm", "s", *where, "--python", "/apps/of/the/nodes/python")
    assert "was not searched" not in shell("gc", "slurm", "--yes")
    old = tmp_path / "python-3.6"
    pretend = "import sys; sys.version_info = (3, 6, 8); exec(sys.argv[1])"
    old.write_text(f"#!/bin/bash\nexec {shell.python} -c '{pretend}' \"${{@: -1}}\"\n")
    old.chmod(0o755)
    said = shell("attach-hosts", "h", "--hosts", "m0", "--python", str(old), "--dir", str(tmp_path / "m"), code=2)
    assert "it is Python 3.6" in said


def test_an_idle_node_that_does_not_answer_is_told(shell: Shell, tmp_path: Path) -> None:
    """Somebody takes it between the question which nodes are idle and the job that asks them."""
    names = ({"names": "n1"}, {"names": "n2", "taken": True})
    nodes = [{"count": 1, "state": "idle", "partition": "debug", **name} for name in names]
    Path(shell.environment["SLURM_CONF"]).with_name("nodes.json").write_text(json.dumps(nodes))
    said = shell("attach-slurm", "s", "--shared", str(tmp_path / "far"), "--python", shell.python)
    assert "Only n1.0 answered, of 2 idle nodes" in said
    assert "1 idle node did not answer" in shell("doctor", "slurm")


@pytest.mark.slow
def test_an_ssh_configuration_is_found_from_every_folder(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "cfg").write_text("Host *\n")
    hosts = ("--hosts", "m0", "--python", shell.python, "--dir", str(tmp_path / "far"), "--interface", "lo")
    for number, given in enumerate(("cfg", "~/cfg")):
        shell("attach-hosts", "lab", *hosts, "--ssh-config", given)
        assert Store(tmp_path / "home").cluster("lab").details["ssh_config"] == str(tmp_path / "cfg")
        shell("run", f"r{number}", "1", "--command", "echo hi", "--yes", where=Path("/"))
    for lost in ("lost", "~nobody-of-this-name/cfg"):
        assert "does not exist" in shell("attach-hosts", "lab", *hosts, "--ssh-config", lost, code=4)


def test_one_machine_under_two_names_is_told(shell: Shell, tmp_path: Path) -> None:
    hosts = ("--hosts", "m0,m1", "--python", shell.python, "--dir", str(tmp_path / "far"), "--interface", "lo")
    assert "m0, m1 are one machine" in shell("attach-hosts", "lab", *hosts)
    assert "m0, m1 are one machine" in shell("doctor", "hosts")  # nothing has failed: exit code 0


def test_lists_of_hosts_and_variables_may_come_from_windows(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "hosts.txt").write_text("\ufeffm0\r\nm1\r\n")
    (tmp_path / "envs.conf").write_text("\ufeff[env]\r\nA=1\r\n")
    # bash leaves a ~ behind = alone.
    words = ("--hosts=~/hosts.txt", "--env-file=~/envs.conf", "--python", shell.python, "--interface", "lo")
    found = json.loads(shell("attach-hosts", "lab", *words, "--dir", str(tmp_path / "far"), "-o", "json"))
    assert [host["name"] for host in found["hosts"]] == ["m0", "m1"]
    assert Store(tmp_path / "home").cluster("lab").details["env"] == {"A": "1"}


def test_gc_leaves_attached_machines_attached(shell: Shell, tmp_path: Path) -> None:
    shell("attach-slurm", "s", "--shared", str(tmp_path / "far"), "--python", shell.python, "--no-probe")
    shell(
        "attach-hosts",
        "h",
        "--hosts",
        "m0",
        "--python",
        shell.python,
        "--dir",
        str(tmp_path / "m"),
        "--interface",
        "lo",
    )
    assert "Nothing to delete." in shell("gc", "slurm", "hosts", "--yes")
    assert {cluster.name for cluster in Store(tmp_path / "home").clusters()} >= {"s", "h"}
