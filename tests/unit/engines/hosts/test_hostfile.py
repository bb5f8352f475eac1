"""Lists of hosts, host files and environment files."""

import pytest

from mlbench_cli.engines.hosts.hostfile import MAX_HOSTS, HostEntry, parse_environment, parse_file, parse_list
from mlbench_cli.errors import UsageError


def test_a_list_has_hosts_with_or_without_slots() -> None:
    assert parse_list("m1, me@m2:4,") == [HostEntry("m1"), HostEntry("me@m2", 4)]


def test_host_files_of_both_mpi_families_are_read() -> None:
    text = "# cluster4\nm1 slots=2 max_slots=4\nm2:3\n\nm3   # last\n"
    assert parse_file(text) == [HostEntry("m1", 2), HostEntry("m2", 3), HostEntry("m3")]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "m1,m1",
        "a@m1,b@m1",
        "-oProxyCommand=id",
        "m1;id",
        "m1,,m2",
        "m1:0",
        "m1:x",
        "m1:65",
        "m$(id)",
        "m1\nm2",
        "é",
    ],
)
def test_rubbish_in_a_list_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_list(text)


def test_a_host_may_be_listed_once_and_the_list_has_a_limit() -> None:
    with pytest.raises(UsageError, match="m1 is listed 3 times") as caught:
        parse_list("m1,m2,a@m1,m1")
    assert "m1 slots=3" in (caught.value.hint or "")
    many = ",".join(f"m{number}" for number in range(MAX_HOSTS))
    assert len(parse_list(many)) == MAX_HOSTS == 2048
    with pytest.raises(UsageError, match="2049 hosts"):
        parse_list(f"{many},more")


@pytest.mark.parametrize("text", ["", "# nothing\n", "m1 m2\n", "m1 slots=two\n", "m1 \x00\n", "m1\nm1\n", "{a: 1}\n"])
def test_rubbish_in_a_host_file_is_refused_with_its_line(text: str) -> None:
    with pytest.raises(UsageError):
        parse_file(text)


@pytest.mark.parametrize("text", ["fd00::5", "me@fd00::5:2", "[fd00::5]:2"])
def test_an_address_of_ipv6_needs_a_name(text: str) -> None:
    for parse in (parse_list, parse_file):
        with pytest.raises(UsageError) as caught:
            parse(text)
        assert "HostName" in str(caught.value.hint)


def test_an_environment_file_gives_variables_and_leaves_the_engines_own() -> None:
    text = '[env]\n# comment\nexport\tNCCL_DEBUG=INFO\nA=\'$b c\' # $d\nB="e\\"\\$f"\nRANK=3\nMLBENCH_SEED=1\n'
    assert parse_environment(text) == {"NCCL_DEBUG": "INFO", "A": "$b c", "B": 'e"$f'}
    assert parse_environment("export N=4  # per rank\nA='x # y' # z\nB=a#b\n") == {"N": "4", "A": "x # y", "B": "a#b"}


@pytest.mark.parametrize(
    "text",
    [
        *("no equals\n", "1A=2\n", "AWS_SECRET_ACCESS_KEY=x\n", "=x\n", "A='b\n", "A='b'c\n", "A=\0\n"),
        *("PATH=/x:$PATH\n", 'A="${B:-1}"\n', "A=$(date)\n", "A=`date`\n"),  # which only a shell replaces
    ],
)
def test_a_bad_environment_file_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_environment(text)
