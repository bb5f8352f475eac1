"""What the shipped tasks measure: their parameters with limits, and the values of `spec` and what other presets change.

Another default or preset would give results under the same name that cannot be compared with earlier ones. A wanted
change is written to parameters.txt by `python -m tests.unit.tasks.test_parameters`, and belongs in the changelog.
"""

from collections.abc import Iterator
from pathlib import Path

from mlbench_cli.tasks.catalog import Task, load_catalog

LISTED = Path(__file__).parent / "parameters.txt"


def describe(task: Task) -> Iterator[str]:
    for name, parameter in task.parameters.items():
        limits = f" {parameter.min} to {parameter.max}" if (parameter.min, parameter.max) != (None, None) else ""
        choices = f" {'|'.join(map(str, parameter.choices))}" if parameter.choices else ""
        former = f" formerly {parameter.formerly}" if parameter.formerly else ""
        yield f"{task.name} {name}: {parameter.type}{limits}{choices}{former}"
    spec = task.resolve("spec")
    for preset in task.presets:
        changes = {name: value for name, value in task.resolve(preset).items() if value != spec[name]}
        yield from (f"{task.name} {preset}: {name}={value}" for name, value in (changes or spec).items())


def list_all() -> str:
    shipped = [task for _, task in sorted(load_catalog().items()) if task.origin is None]
    return "".join(f"{line}\n" for task in shipped for line in describe(task))


def test_parameters_and_presets_are_those_that_results_were_measured_with() -> None:
    assert list_all().splitlines() == LISTED.read_text("utf-8").splitlines()


if __name__ == "__main__":
    LISTED.write_text(list_all(), "utf-8")
