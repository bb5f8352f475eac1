"""Templates: values cannot break out of their place, mistakes are named, and the output is stable."""

import json
from pathlib import Path

import pytest
import yaml

from templates import TemplateError, documents, dump, render, to_json


def write(folder: Path, text: str) -> Path:
    (folder / "t.j2").write_text(text, "utf-8")
    return folder


@pytest.mark.parametrize("value", ["a: b\n- c", '"}', "\x85", "\u2028x", "\ufeff", "\x7f", "ü€", {"b": 1, "a": [None]}])
def test_a_value_is_read_back_from_json_and_from_yaml_as_it_was(value: object) -> None:
    text = to_json(value)
    assert json.loads(text) == yaml.safe_load(text) == value


def test_characters_that_yaml_refuses_are_escaped_and_others_are_not() -> None:
    assert to_json("\x7f\x9f\u2028\u2029\ufeff\ufffe\uffff") == r'"\u007f\u009f\u2028\u2029\ufeff\ufffe\uffff"'
    assert to_json({"b": "ü~\xa0", "a": 1}) == '{"a": 1, "b": "ü~\xa0"}'


def test_a_users_template_takes_the_place_of_the_shipped_one(tmp_path: Path) -> None:
    values = {"name": "demo", "workers": 1, "reserved_cpus": 0}
    (tmp_path / "kind").mkdir()
    (tmp_path / "kind" / "cluster.yaml.j2").write_text("kind: {{ name | tojson }}\n")
    assert render("kind/cluster.yaml.j2", values, tmp_path) == 'kind: "demo"'
    assert "role: control-plane" in render("kind/cluster.yaml.j2", values)
    assert "role: control-plane" in render("kind/cluster.yaml.j2", values, tmp_path / "kind")


def test_lines_of_statements_leave_no_trace(tmp_path: Path) -> None:
    text = "a:\n  {% for item in items %}\n  - {{ item | tojson }}\n  {% endfor %}\nb: <&>\n"
    assert render("t.j2", {"items": ["<", 2]}, write(tmp_path, text)) == 'a:\n  - "<"\n  - 2\nb: <&>'


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{{ missing }}", "t.j2: 'missing' is undefined"),
        ("{% if %}", "t.j2: Expected an expression"),
        ("a: [", "t.j2: not valid YAML"),
        ("- a\n", "t.j2: a document is not a mapping"),
    ],
)
def test_a_mistake_names_the_template(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(TemplateError) as caught:
        documents("t.j2", {}, write(tmp_path, text))
    assert str(caught.value).startswith(says)


def test_a_template_that_does_not_exist_is_named() -> None:
    with pytest.raises(TemplateError, match=r"^none\.j2: "):
        render("none.j2", {})


def test_empty_documents_are_left_out(tmp_path: Path) -> None:
    assert documents("t.j2", {}, write(tmp_path, "---\n---\na: 1\n---\n# nothing\n---\nb: 2\n")) == [{"a": 1}, {"b": 2}]


def test_documents_are_written_in_the_order_of_their_keys_without_aliases() -> None:
    shared = ["x"]
    text = dump([{"b": shared, "a": shared}, {"script": "one\ntwo\n", "name": "ü"}])
    assert text == "---\nb:\n- x\na:\n- x\n---\nscript: |\n  one\n  two\nname: ü\n"
