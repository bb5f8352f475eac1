"""What a user's program reports, in every command: two versions of a script, measured three times each."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.app import run
from tests.contract.clients import answer
from tests.needs import needs

Captured = pytest.CaptureFixture[str]
pytestmark = pytest.mark.usefixtures("home")

# The accuracy rises in the first version and falls at the end in the second, which is a fifth slower.
SCRIPT = """
import json, os, random, time
noise = random.Random(os.environ["MLBENCH_SEED"]).random() / 1000
def emit(name, value):
    event = {"v": 1, "event": "metric", "rank": 0, "time": time.time(), "name": name, "value": value}
    print("@mlbench " + json.dumps(event))
for accuracy in ACCURACIES:
    emit("accuracy", accuracy + noise)
    emit("loss", 1 - accuracy)
    emit("tokens_per_second", SPEED * (1 + noise))
    emit("temperature", 20.0)
emit("loss", float("nan"))
"""


@pytest.fixture
def versions(home: Path) -> None:
    """Experiments a and b of two versions of train.py."""
    for name, accuracies, speed in (("a", "[0.5, 0.7, 0.9]", "1000"), ("b", "[0.5, 0.8, 0.6]", "800")):
        Path("train.py").write_text(SCRIPT.replace("ACCURACIES", accuracies).replace("SPEED", speed))
        argv = ["run", name, "1", "--command", "python train.py", "--repeat", "3", "--share-machine"]
        assert run(argv) == 0


@pytest.mark.slow
@pytest.mark.usefixtures("versions")
def test_every_reported_metric_is_a_figure_everywhere(capsys: Captured) -> None:
    assert run(["status", "a"]) == 0
    assert "tokens_per_second" in capsys.readouterr().out
    figures = answer(capsys, "status", "b-1-r1")["metric_figures"]
    assert figures["accuracy"]["last"] == pytest.approx(0.6, abs=0.002)
    assert figures["accuracy"]["best"] == pytest.approx(0.8, abs=0.002)
    assert figures["accuracy"]["mean"] == pytest.approx(1.9 / 3, abs=0.002)
    assert (figures["loss"]["last"], figures["loss"]["best"]) == ("nan", pytest.approx(0.2))
    assert figures["temperature"]["best"] is None  # nobody knows which direction is better

    repeats = {item["name"]: item for item in answer(capsys, "status")["repeats"]}
    assert repeats["b-1"]["metrics"]["accuracy"]["best"]["mean"] == pytest.approx(0.8, abs=0.002)

    rows = answer(capsys, "compare", "a", "b")["rows"]
    assert rows["tokens_per_second"]["ratio"]["mean"] == pytest.approx(0.8, rel=0.01)
    assert rows["tokens_per_second"]["higher_is_better"] is True
    assert rows["loss best"]["higher_is_better"] is False
    assert rows["temperature"]["higher_is_better"] is None
    assert run(["compare", "a", "b", "--metric", "accuracy", "--across", "conditions"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("accuracy, b against a: 1.50× lower (1.50 to 1.50) (95 %; 3 and 3 runs).")
    assert "TIME" not in out
    assert "tokens_per_second" not in out

    for form in ("md", "html"):
        assert run(["report", f"report.{form}", "a", "b"]) == 0
        page = Path(f"report.{form}").read_text().replace("\\", "")
        assert "a, b: python train.py" in page
        assert "tokens_per_second" in page
        assert "custom takes" not in page
        assert "default method" not in page
    capsys.readouterr()
    assert run(["charts", "figures", "a", "b"]) == 0
    assert capsys.readouterr().out.startswith("Wrote metrics, total_time, ")  # what the script is about comes first
    drawn = list(csv.DictReader(Path("figures/metrics.csv").read_text().splitlines()))
    bars = {row["x"]: float(row["y"]) for row in drawn if row["chart"] == "Accuracy at the end"}
    assert bars == pytest.approx({"a": 0.9, "b": 0.6}, abs=0.002)
    summary = list(csv.DictReader(Path("figures/summary.csv").read_text().splitlines()))
    assert sorted(float(row["accuracy best"]) for row in summary) == pytest.approx([0.8, 0.9], abs=0.002)

    assert run(["export", "csv", "points.csv", "a", "b"]) == 0
    points = list(csv.DictReader(Path("points.csv").read_text().splitlines()))
    assert {row["seed"] for row in points} == {"42", "43", "44"}
    assert {(row["preset"], row["network"], row["method"]) for row in points} == {("custom", "", "")}


def test_a_metric_that_diverged_is_no_empty_cell(capsys: Captured) -> None:
    Path("train.py").write_text(
        "import os\nfrom mlbench import emit\n"
        "for value in (float('nan'), 2.0, 1.0): emit('metric', name='loss', value=value)\n"
        "if os.environ['MLBENCH_SEED'] == '42': emit('metric', name='loss', value=float('nan'))\n"
        "emit('metric', name='perplexity', value=float('inf'))\n"
    )
    assert run(["run", "far", "1", "--command", "python train.py", "--repeat", "2", "--share-machine"]) == 0
    rows = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "far-1 loss nan in 1 of 2 runs 1.00 1.50" in rows
    assert "far-1 perplexity inf in 2 of 2 runs – –" in rows
    for form in ("md", "html"):
        assert run(["report", f"far.{form}", "far"]) == 0
        page = Path(f"far.{form}").read_text()
        assert "nan in 1 of 2 runs" in page
        assert "inf in 2 of 2 runs" in page
    assert run(["report", "one.md", "far-1-r1"]) == 0
    assert "| loss | 1 worker | nan | 1.00 | 1.50 |" in Path("one.md").read_text()


def test_a_metric_keeps_its_unit_and_is_told_from_figures_of_its_name(capsys: Captured) -> None:
    Path("train.py").write_text(
        "from mlbench import emit\nemit('metric', name='throughput', value=120, unit='images/s')\n"
        "emit('metric', name='seconds', value=1234)\nemit('metric', name='temperature', value=70, unit='K')\n"
    )
    assert run(["run", "named", "1", "--command", "python train.py", "--repeat", "2", "--share-machine"]) == 0
    assert "70.0 K" in capsys.readouterr().out
    rows = answer(capsys, "compare", "named-1-r1", "named-1-r2", "--across", "conditions")["rows"]
    assert rows["seconds"]["a"]["mean"] < 600
    assert (rows["reported seconds"]["a"]["mean"], rows["reported seconds"]["is_metric"]) == (1234, True)
    assert rows["throughput"]["unit"] == "images/s"
    assert run(["report", "named.md", "named"]) == 0
    page = Path("named.md").read_text().replace("\\", "")
    assert "| reported seconds | 1 worker | 20 min 34 s | 20 min 34 s |" in page
    assert "| throughput | 1 worker | 120 images/s |" in page
    assert "samples/s" not in page
    capsys.readouterr()
    assert run(["status", "named-1-r1"]) == 0
    out = capsys.readouterr().out
    assert "120 images/s" in out
    assert "reported seconds" in out
    assert "70.0 K" in out


def test_variants_of_a_command_are_one_comparison(capsys: Captured) -> None:
    """A matrix over {KEY}: the runs differ in a parameter, not in their commands. Of two parameters with one value, the
    option in front of it says which is meant."""
    Path("train.py").write_text(SCRIPT.replace("ACCURACIES", "[0.5, 0.9]").replace("SPEED", "1000"))
    words = ["--command", "python train.py --lr {lr} --decay={decay}", "--set", "decay=0.1", "--matrix", "set.lr=0.1,1"]
    assert run(["run", "vary", "1", *words, "--repeat", "3", "--share-machine"]) == 0
    assert all(each["seconds"] > 0 for each in answer(capsys, "status", "vary")["runs"])
    found = answer(capsys, "compare", "vary-lr0p1-1", "vary-lr1-1", "--across", "conditions")  # the machine may be busy
    assert found["is_comparable"] is True
    assert found["obstacles"] == ["The values of lr differ: 0.1 and 1."]
    assert run(["report", "vary.md", "vary"]) == 0
    page = Path("vary.md").read_text().replace("\\", "")
    assert "vary: python train.py --lr {lr} --decay={decay} · this machine" in page
    assert "| lr=1 |" in page
    assert run(["export", "csv", "vary.csv", "vary"]) == 0
    assert {row["set.lr"] for row in csv.DictReader(Path("vary.csv").read_text().splitlines())} == {"0.1", "1"}


def report(name: str, *metrics: tuple[str, float], nan_below: int = 0) -> None:
    """Three runs that report these metrics, and a loss of nan at the end with seeds below `nan_below`."""
    emits = "\n".join(f"emit({metric!r}, {value})" for metric, value in metrics)
    last = f"if int(os.environ['MLBENCH_SEED']) < {nan_below}: emit('loss', math.nan), emit('seconds', math.nan)"
    Path("report.py").write_text(f"import math{SCRIPT.partition('for accuracy')[0]}{emits}\n{last}\n")
    assert run(["run", name, "1", "--command", "python report.py", "--repeat", "3", "--share-machine"]) == 0


def test_the_exact_name_of_a_figure_means_that_one(capsys: Captured) -> None:
    report("a", ("Seconds", 1.0))
    report("b", ("Seconds", 3.0))
    gate = ["gate", "b", "--baseline", "a", "--across", "conditions", "--check"]
    assert answer(capsys, *gate, "seconds=+9900%")["checks"][0]["metric"] == "seconds"
    assert answer(capsys, *gate, "Seconds=2", code=7)["checks"][0]["metric"] == "Seconds"


def test_a_gate_fails_on_a_metric_that_diverged(capsys: Captured) -> None:
    """Whether in one run or in all of them; nothing follows from a baseline that diverged."""
    report("good", ("loss", 1.0))
    report("once", ("loss", 1.0), nan_below=43)
    report("always", ("loss", 1.0), nan_below=45)
    gate = ["--across", "conditions", "--check", "loss=+10%"]
    for name, words in (("once", "loss: nan in 1 of 3 runs."), ("always", "loss: nan in 3 of 3 runs.")):
        [check] = answer(capsys, "gate", name, "--baseline", "good", *gate, code=7)["checks"]
        assert check["reason"].startswith(words)
    [check] = answer(capsys, "gate", "once", "--baseline", "good", *gate[:2], "--check", "seconds=+9900%")["checks"]
    assert check["verdict"] == "passed"
    report("huge", ("loss", 1e300))
    [check] = answer(capsys, "gate", "huge", "--baseline", "good", *gate, code=7)["checks"]
    assert check["reason"].startswith("loss: above 1e+100 in 3 of 3 runs.")
    [check] = answer(capsys, "gate", "good", "--baseline", "once", *gate, code=9)["checks"]
    assert check["reason"].startswith("loss of the baseline: nan in 1 of 3 runs.")
    assert run(["compare", "good", "once"]) == 0
    assert "nan in 1 of 3 runs" in capsys.readouterr().out
    assert run(["reproduce", "once", "--metric", "loss"]) == 2
    assert 'once-1-r1 of the original has no figure "loss"' in capsys.readouterr().err


def test_values_in_different_units_are_not_compared(capsys: Captured) -> None:
    """2 ms and 0.002 s; a version that reports no unit has the same one."""
    script = "import os\nfrom mlbench import emit\nvalue, unit = {}\nemit('metric', name='latency', value=value{})\n"
    choices = {"ms": "2.0, 'ms'", "s": "0.002, 's'", "none": "2.0, ''"}
    choices["both"] = "(2.0, 'ms') if os.environ['MLBENCH_SEED'] == '42' else (0.002, 's')"
    for name, values in choices.items():
        Path("units.py").write_text(script.format(values, "" if name == "none" else ", unit=unit"))
        words = ["--command", "python units.py", "--repeat", "3", "--share-machine"]
        assert run(["run", name, "1", *words]) == 0
    rows = answer(capsys, "compare", "ms", "s")["rows"]
    assert (rows["latency"]["ratio"], rows["latency"]["words"]) == (None, "other unit")
    assert answer(capsys, "compare", "ms", "none")["rows"]["latency"]["ratio"]["mean"] == 1
    assert answer(capsys, "compare", "ms", "both")["rows"]["latency"]["b"] is None
    gate = ["gate", "s", "--baseline", "ms", "--across", "conditions", "--check", "latency=+10%"]
    [check] = answer(capsys, *gate, code=9)["checks"]
    assert check["reason"].startswith("latency is in ms in the baseline, and in s now.")
    assert run(["status", "both"]) == 0
    assert "latency" not in capsys.readouterr().out.partition("METRIC")[2]


@pytest.mark.parametrize(
    ("command", "axis", "values", "words"),
    [
        ("echo --epochs 1 --num-layers {layers}", "set.layers", [1, 2], "The values of layers differ: 1 and 2."),
        ("echo --lr {lr} --out run-{lr}", "set.lr", ["1e-3", ".5e0"], "The values of lr differ: 0.001 and .5e0."),
        ("echo --decay={wd} x", "set.wd", ["1E-4", "1.0"], "The values of wd differ: 0.0001 and 1.0."),
        ("echo conf_{size}.yaml", "set.size", ["s", "xl"], "The values of size differ: s and xl."),
        ("echo --compile {jit}", "set.jit", [True, False], "The values of jit differ: true and false."),
        ("echo data_{k}gb.bin 0.{k}", "set.k", [1, 2], "The values of k differ: 1 and 2."),
    ],
    ids=["constant", "exponent", "capital", "part", "switch", "digits"],
)
def test_points_of_a_matrix_are_runs_of_one_command(
    capsys: Captured, command: str, axis: str, values: list[Any], words: str
) -> None:
    """A constant that equals a value, as epochs with layers=1, stays; numbers and switches have several spellings."""
    Path("x.yaml").write_text(json.dumps({"command": command, "matrix": {axis: values}, "workers": 1}))
    runs = answer(capsys, "run", "x", "-f", "x.yaml", "--share-machine")["runs"]
    found = answer(capsys, "compare", *(each["name"] for each in runs), "--across", "conditions")
    assert found["obstacles"] == [words]


@pytest.mark.slow
@pytest.mark.usefixtures("versions")
def test_a_gate_on_a_metric_compares_two_versions_of_a_script(capsys: Captured) -> None:
    gate = ["gate", "b", "--baseline", "a", "--across", "conditions"]
    [slower] = answer(capsys, *gate, "--check", "tokens_per_second=10%", code=7)["checks"]
    assert slower["worse"]["mean"] == pytest.approx(1.25, rel=0.01)
    assert slower["name"] == "b: python train.py gloo cpu 1: tokens_per_second"
    assert answer(capsys, *gate, "--check", "tokens_per_second=+50%")["verdict"] == "passed"
    [better] = answer(capsys, *gate[:1], "a", *gate[2:3], "b", *gate[4:], "--check", "accuracy best=5%")["checks"]
    assert better["worse"]["mean"] < 1

    assert run([*gate, "--check", "tokens=5%"]) == 7  # a part of a name, as of compare --metric
    assert run([*gate, "--check", "best=5%"]) == 2
    assert "tokens_per_second best" in capsys.readouterr().err
    assert run([*gate, "--check", "temperature"]) == 2
    assert "--direction" in capsys.readouterr().err
    assert run([*gate, "--check", "temperature", "--direction", "lower"]) == 0


def test_an_experiment_whose_name_begins_with_default_is_no_method() -> None:
    for name, seconds in (("default-lr", 0.02), ("high-lr", 0.5)):
        Path("train.sh").write_text(f"sleep {seconds}\n")
        assert run(["run", name, "1", "--command", "sh train.sh", "--repeat", "3", "--share-machine"]) == 0
    assert run(["report", "report.md", "default-lr", "high-lr"]) == 0
    title = Path("report.md").read_text().partition("\n")[0]
    assert " default-lr" in title
    assert "the default-lr" not in title


def test_metrics_that_are_not_above_0_are_compared_by_their_difference(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reward of -10 has no ratio to one of -12, and 2 less is worse; the interval is that of scipy."""
    sides = {"old": [-10.0, -10.4, -9.7], "new": [-12.1, -12.0, -12.6], "near": [-10.2, -9.8, -10.3], "up": [3.0, 4, 5]}
    for name, values in sides.items():
        report(name, ("reward", f"{values}[int(os.environ['MLBENCH_SEED']) - 42]"))  # type: ignore[arg-type]
    row = answer(capsys, "compare", "old", "new", "--metric", "reward")["rows"]["reward"]
    test = needs("scipy.stats").ttest_ind(sides["new"], sides["old"], equal_var=False)
    ends = test.confidence_interval(0.95)
    found = row["difference"]
    assert row["ratio"] is None
    assert [found["mean"], found["low"], found["high"]] == pytest.approx([-2.2, ends.low, ends.high])
    assert row["words"] == f"2.20 lower ({-ends.high:.3g} to {-ends.low:.3g})"
    assert answer(capsys, "compare", "old", "up")["rows"]["reward"]["words"].startswith("14.0 higher (")
    gate = ("--baseline", "old", "--across", "conditions", "--check")
    [worse] = answer(capsys, "gate", "new", *gate, "reward=+5%", code=7)["checks"]
    assert "2.20 lower" in worse["reason"]
    assert "limit 0.502 (5 % of the baseline's mean)" in worse["reason"]
    assert worse["worse"]["mean"] == pytest.approx(2.2)
    for name, limit in (("new", "+50%"), ("near", "+10%"), ("up", "+1%")):
        assert answer(capsys, "gate", name, *gate, f"reward={limit}")["verdict"] == "passed"
    assert answer(capsys, "gate", "near", *gate, "reward=+1%", code=9)["verdict"] == "cannot_tell"
    within = ("--within", "10%", "--metric", "reward")
    assert run(["reproduce", "old", "--with", "near", *within]) == 0
    assert "reward: reproduced within" in capsys.readouterr().out
    assert run(["reproduce", "old", "--with", "new", *within]) != 0
    assert "reward: different, -2.20" in capsys.readouterr().out
    assert run(["report", "page.md", "old", "new"]) == 0
    assert "2.20 lower" in Path("page.md").read_text()
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", "summary.md")
    assert run(["gate", "new", *gate, "reward=+5%"]) == 7
    assert "2.20 lower" in Path("summary.md").read_text()


def test_a_metric_without_any_number_has_no_chart() -> None:
    nan: Any = "math.nan"
    report("n", ("loss", 2.0), ("loss", 1.0), ("val_loss", nan))
    assert run(["charts", "charts", "n"]) == 0
    rows = list(csv.DictReader(Path("charts/metrics.csv").read_text().splitlines()))
    assert {row["chart"] for row in rows} == {"Loss"}


def test_values_of_one_run_in_several_units_have_no_mean(capsys: Captured) -> None:
    """900 MB and 1.2 GB, as loggers write them, are not 451 GB on average."""
    script = "from mlbench import emit\nfor value, unit in ((900, 'MB'), (1.2, 'GB')):\n"
    Path("memory.py").write_text(f"{script}    emit('metric', name='memory', value=value, unit=unit)\n")
    assert run(["run", "m", "1", "--command", "python memory.py", "--share-machine"]) == 0
    capsys.readouterr()
    assert run(["status", "m-1"]) == 0
    out = capsys.readouterr().out
    assert "1.20 GB" in out
    assert "45" not in out.partition("METRIC")[2]
