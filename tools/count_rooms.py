"""Count the rooms that a reader enters: `python -m tools.count_rooms FUNCTION...`; default: the way of a followed run.

A reader starts at a function and reads it line by line. At each call of a function, method or class that he has not
read yet he goes there, reads it, and comes back. A *room* is a module in a package of mlbench_cli or providers. The
modules beside those packages (errors, model, spec, store and so on) are the ground floor: words that every reader
knows, not entered. Neither are task_images and templates, nor the methods of protocols: there is nothing to read.

A *stay* begins when he comes to read something of another room than what he read before. *Returns* are the stays in a
room in which he has been: stays less rooms. Types are inferred from annotations; a call through a value without one is
not followed. `tests/unit/test_rooms.py` holds the limits of the way of a run.
"""

import argparse
import ast
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
WAY_OF_A_RUN = "mlbench_cli.runs.supervise.follow"
PACKAGES = ("mlbench_cli", "providers")
_FIRST = ("closing", "sorted", "list", "tuple", "reversed", "iter", "replace")  # they return what they are given
_ITEM = ("next", "min", "max")  # they return one of what they are given


@dataclass(frozen=True)
class Place:
    """A function or class of a module; `owner` is the class of a method."""

    module: str
    node: ast.FunctionDef | ast.ClassDef
    owner: ast.ClassDef | None = None

    @property
    def name(self) -> str:
        """Name in its module: "RunFolder.lock"."""
        return f"{self.owner.name}.{self.node.name}" if self.owner else self.node.name


@dataclass(frozen=True)
class Kind:
    """What is known of a value: its class, or what it yields."""

    cls: Place | None = None
    items: tuple["Kind | None", ...] = ()

    @property
    def item(self) -> "Kind | None":
        """The kind of its items."""
        return self.items[0] if self.items else None


@dataclass
class Walk:
    """The way of a reader: functions, and classes without code of their own, in the order in which they are read."""

    places: list[Place] = field(default_factory=list)

    @property
    def stays(self) -> list[str]:
        """The rooms in the order in which they are entered."""
        rooms = [place.module for place in self.places]
        return [room for number, room in enumerate(rooms) if number == 0 or room != rooms[number - 1]]

    @property
    def rooms(self) -> set[str]:
        """Every room that is entered."""
        return set(self.stays)

    @property
    def returns(self) -> int:
        """How often a room is entered again."""
        return len(self.stays) - len(self.rooms)


class House:
    """The modules of a source tree, and what their names mean."""

    def __init__(self, root: Path = ROOT) -> None:
        self._paths = {_module_name(path.relative_to(root)): path for name in PACKAGES for path in _modules(root, name)}
        self._packages = {name for name, path in self._paths.items() if path.name == "__init__.py"}

    def is_room(self, module: str) -> bool:
        """Whether a module is in a package, not beside the packages."""
        package = module if module in self._packages else module.rpartition(".")[0]
        return package not in ("", "mlbench_cli")

    @cache  # noqa: B019
    def tree(self, module: str) -> ast.Module:
        """The module's code."""
        return ast.parse(self._paths[module].read_text("utf-8"))

    @cache  # noqa: B019
    def _names(self, module: str) -> dict[str, ast.stmt | str]:
        """What the module's names are: definitions, values, or the dotted names that they were imported by."""
        names: dict[str, ast.stmt | str] = {}
        for node in ast.walk(self.tree(module)):
            if isinstance(node, ast.Import):
                names |= {alias.asname or alias.name.split(".")[0]: alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        for statement in self.tree(module).body:
            if isinstance(statement, ast.FunctionDef | ast.ClassDef):
                names[statement.name] = statement
            elif isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
                names[statement.targets[0].id] = statement
        return names

    def find(self, dotted: str) -> Place | ast.Assign | str | None:
        """What a dotted name means: a function or class, a module's value, or a module (its name)."""
        if dotted in self._paths:
            return dotted
        parent, _, name = dotted.rpartition(".")
        above = self.find(parent) if parent else None
        if isinstance(above, str):
            return self.find_in(above, name)
        return self.find_member(above, name) if isinstance(above, Place) else None

    def find_in(self, module: str, name: str) -> Place | ast.Assign | str | None:
        """What a name means in a module."""
        found = self._names(module).get(name)
        if isinstance(found, ast.FunctionDef | ast.ClassDef):
            return Place(module, found)
        if isinstance(found, str):
            return self.find(found)
        return found if isinstance(found, ast.Assign) else None

    def find_expression(self, module: str, node: ast.expr) -> Place | ast.Assign | str | None:
        """What a name, or names joined by dots, mean in a module."""
        if isinstance(node, ast.Name):
            return self.find_in(module, node.id)
        if isinstance(node, ast.Attribute):
            above = self.find_expression(module, node.value)
            if isinstance(above, str):
                return self.find(f"{above}.{node.attr}")
            return self.find_member(above, node.attr) if isinstance(above, Place) else None
        return None

    def find_member(self, cls: Place, name: str) -> Place | None:
        """A method of a class or of its bases."""
        if not isinstance(cls.node, ast.ClassDef):
            return None
        for node in cls.node.body:
            if isinstance(node, ast.FunctionDef) and node.name == name:
                return Place(cls.module, node, cls.node)
        for base in self.bases(cls):
            if (found := self.find_member(base, name)) is not None:
                return found
        return None

    def bases(self, cls: Place) -> Iterator[Place]:
        """The classes of the house that a class inherits from."""
        for base in cls.node.bases if isinstance(cls.node, ast.ClassDef) else ():
            found = self.find_expression(cls.module, base)
            if isinstance(found, Place):
                yield found

    def find_attribute(self, cls: Place, name: str) -> Kind | None:
        """The kind of an attribute or property, by its annotation or by what __init__ assigns."""
        for node in cls.node.body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == name:
                return self.find_kind(cls.module, node.annotation)
            if isinstance(node, ast.FunctionDef) and node.name == name:
                return self.find_kind(cls.module, node.returns)
        init = self.find_member(cls, "__init__")
        return None if init is None else Reader(self, init, Walk(), set()).find_assigned(name)

    def find_kind(self, module: str, annotation: ast.expr | None) -> Kind | None:
        """The kind of value that an annotation names."""
        if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
            annotation = ast.parse(annotation.value, mode="eval").body
        if isinstance(annotation, ast.BinOp):
            return self.find_kind(module, annotation.left) or self.find_kind(module, annotation.right)
        if isinstance(annotation, ast.Subscript):
            inner = annotation.slice.elts if isinstance(annotation.slice, ast.Tuple) else [annotation.slice]
            name = ast.unparse(annotation.value)
            is_container = name not in ("dict", "Mapping", "Callable", "type")
            return Kind(None, tuple(self.find_kind(module, item) for item in inner)) if is_container else None
        if not isinstance(annotation, ast.Name | ast.Attribute):
            return None
        found = self.find_expression(module, annotation)
        if isinstance(found, ast.Assign):
            return self.find_kind(module, found.value)
        return Kind(found) if isinstance(found, Place) and isinstance(found.node, ast.ClassDef) else None


class Reader:
    """Reads one function, and through it all that it calls."""

    def __init__(self, house: House, place: Place, walk: Walk, known: set[ast.AST]) -> None:
        self._house, self._module, self._walk, self._known = house, place.module, walk, known
        self._node = place.node
        self._values: dict[str, Kind | None] = {}
        if isinstance(place.node, ast.FunctionDef):
            self._take_parameters(place.node)
        if place.owner is not None:
            self._values |= {
                "self": Kind(Place(place.module, place.owner)),
                "cls": Kind(Place(place.module, place.owner)),
            }

    def read(self) -> None:
        """Read the function's lines in turn."""
        for statement in self._node.body:
            self._visit(statement)

    def find_assigned(self, name: str) -> Kind | None:
        """The kind of what the function assigns to the attribute `name` of its object."""
        for node in ast.walk(self._node):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Attribute) and node.target.attr == name:
                return self._house.find_kind(self._module, node.annotation)
            if isinstance(node, ast.Assign):
                for target, value in _pairs(node.targets[0], node.value):
                    if isinstance(target, ast.Attribute) and target.attr == name:
                        return self._infer(value)
        return None

    def _take_parameters(self, function: ast.FunctionDef) -> None:
        parameters = function.args
        for parameter in (*parameters.posonlyargs, *parameters.args, *parameters.kwonlyargs):
            self._values[parameter.arg] = self._house.find_kind(self._module, parameter.annotation)

    def _visit(self, node: ast.AST) -> None:
        match node:
            case ast.FunctionDef():  # read at its place, as a part of the function around it
                self._values[node.name] = None
                self._take_parameters(node)
                self._visit_all(node.body)
            case ast.Assign() | ast.AnnAssign() | ast.NamedExpr():
                self._visit_assignment(node)
            case ast.For() | ast.comprehension():
                self._visit(node.iter)
                kind = self._infer(node.iter)
                self._bind(node.target, kind.item if kind else None)
                self._visit_all(node.body + node.orelse if isinstance(node, ast.For) else node.ifs)
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp():
                self._visit_all([*node.generators, node.elt])
            case ast.DictComp():
                self._visit_all([*node.generators, node.key, node.value])
            case ast.withitem():
                self._visit(node.context_expr)
                if node.optional_vars is not None:
                    self._bind(node.optional_vars, self._infer_entered(node.context_expr))
            case ast.Call():
                self._visit_call(node)
            case ast.Attribute() | ast.Name():
                self._visit_all([node.value] if isinstance(node, ast.Attribute) else [])
                self._go_to(self._find(node), is_call=False)
            case _:
                self._visit_all(ast.iter_child_nodes(node))

    def _visit_all(self, nodes: "Iterator[ast.AST] | Sequence[ast.AST]") -> None:
        for node in nodes:
            self._visit(node)

    def _visit_assignment(self, node: ast.Assign | ast.AnnAssign | ast.NamedExpr) -> None:
        if node.value is not None:
            self._visit(node.value)
        if isinstance(node, ast.AnnAssign):
            self._bind(node.target, self._house.find_kind(self._module, node.annotation))
            return
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            if isinstance(node.value, ast.Tuple):
                for part, value in _pairs(target, node.value):
                    self._bind(part, self._infer(value))
            else:
                self._bind(target, self._infer(node.value))

    def _visit_call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Attribute):
            self._visit(node.func.value)
        self._visit_all([*node.args, *(keyword.value for keyword in node.keywords)])
        self._go_to(self._find(node.func), is_call=True)

    def _bind(self, target: ast.expr, kind: Kind | None) -> None:
        if isinstance(target, ast.Name):
            self._values[target.id] = kind
        elif isinstance(target, ast.Tuple | ast.List):
            for number, part in enumerate(target.elts):
                self._bind(part, kind.items[number] if kind and number < len(kind.items) else None)

    def _find(self, node: ast.expr) -> Place | None:
        """The function, method or class that a name means here."""
        root = node
        while isinstance(root, ast.Attribute):
            root = root.value
        if not (isinstance(root, ast.Name) and root.id in self._values):
            found = self._house.find_expression(self._module, node)
            if isinstance(found, Place):
                return found
        kind = self._infer(node.value) if isinstance(node, ast.Attribute) else None
        return (
            self._house.find_member(kind.cls, node.attr)
            if kind and kind.cls and isinstance(node, ast.Attribute)
            else None
        )

    def _go_to(self, place: Place | None, *, is_call: bool) -> None:
        """Read what is called, or handed on as a function, unless it is known."""
        if place is not None and isinstance(place.node, ast.ClassDef):
            place = (self._house.find_member(place, "__init__") or place) if is_call else None
        if place is None or place.node in self._known or not self._house.is_room(place.module):
            return
        if place.owner is not None and any(ast.unparse(base) == "Protocol" for base in place.owner.bases):
            return
        self._known.add(place.node)
        self._walk.places.append(place)
        if isinstance(place.node, ast.FunctionDef):  # of a class without __init__ the fields, which call nothing
            Reader(self._house, place, self._walk, self._known).read()

    def _infer(self, node: ast.expr | None) -> Kind | None:
        match node:
            case ast.Name():
                return self._values.get(node.id)
            case ast.NamedExpr():
                return self._infer(node.value)
            case ast.BoolOp():
                return next((kind for value in node.values if (kind := self._infer(value))), None)
            case ast.IfExp():
                return self._infer(node.body) or self._infer(node.orelse)
            case ast.Subscript():
                kind = self._infer(node.value)
                return kind.item if kind else None
            case ast.Attribute():
                kind = self._infer(node.value)
                return self._house.find_attribute(kind.cls, node.attr) if kind and kind.cls else None
            case ast.Call():
                return self._infer_call(node)
        return None

    def _infer_entered(self, node: ast.expr) -> Kind | None:
        """What `with` binds: what a function with @contextmanager yields, else the object itself."""
        kind = self._infer(node)
        is_closing = isinstance(node, ast.Call) and ast.unparse(node.func) == "closing"
        return kind.item if kind and kind.items and not is_closing else kind

    def _infer_call(self, node: ast.Call) -> Kind | None:
        found = self._find(node.func)
        if found is not None and isinstance(found.node, ast.FunctionDef):
            if found.owner is not None and ast.unparse(found.node.returns or ast.Constant(0)) == "Self":
                return Kind(Place(found.module, found.owner))
            return self._house.find_kind(found.module, found.node.returns)
        if found is not None:
            return Kind(found)
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        if name == "cls":
            return self._values.get("cls")
        kind = self._infer(node.args[0]) if node.args else None
        if name in _ITEM:
            return kind.item if kind else None
        return kind if name in _FIRST else None


def follow(function: str, house: House | None = None) -> Walk:
    """Read a function, by its dotted name, and all that it calls. Raises ValueError if there is no such function."""
    house = house or House()
    place = house.find(function)
    if not isinstance(place, Place) or not isinstance(place.node, ast.FunctionDef):
        raise ValueError(f"{function} is no function of {' or '.join(PACKAGES)}")
    walk = Walk([place])
    Reader(house, place, walk, {place.node}).read()
    return walk


def _modules(root: Path, package: str) -> list[Path]:
    return sorted((root / package).rglob("*.py"))


def _module_name(path: Path) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def _pairs(target: ast.expr, value: ast.expr) -> list[tuple[ast.expr, ast.expr]]:
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        return list(zip(target.elts, value.elts, strict=False))
    return [(target, value)]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("functions", nargs="*", default=[WAY_OF_A_RUN], metavar="FUNCTION", help="dotted names")
    options = parser.parse_args(argv)
    house = House()
    for function in options.functions:
        try:
            walk = follow(function, house)
        except ValueError as error:
            parser.error(str(error))
        for number, place in enumerate(walk.places):
            is_new = number == 0 or walk.places[number - 1].module != place.module
            print(f"\n{place.module}\n  {place.name}" if is_new else f"  {place.name}")
        print(
            f"\n{function}: {len(walk.rooms)} rooms, {walk.returns} returns, {len(walk.places)} functions and classes"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
