"""Bringing changed source into the running process, so that everyone who uses the code already uses the changed code.

A module that was imported cannot be replaced: others hold its functions by `from` imports, in caches, in closures. So
the changed source is run in a namespace of its own, registered nowhere, and what differs is grafted onto the live
objects: functions keep their identity and get other code, plain constants are bound again wherever they are known by
their name. What cannot be grafted that way is refused, never left out.
"""

from __future__ import annotations

import ast
import functools
import importlib
import types
from collections.abc import Iterator
from typing import Any

from verification.mutants.defect import CannotPlant, Defect
from verification.mutants.syntactic.names import unbound
from verification.run.caches import clear_caches, modules_of

PACKAGES = ("reference", "ring", "verification")
_PLAIN = (type(None), bool, int, float, complex, str, bytes, range)
_GENERATED = ("__init__", "__new__", "__eq__", "__repr__", "__hash__")  # by dataclass and NamedTuple, from the fields


def plant(defect: Defect) -> None:
    """Make this process run with the defect, for good. Raises CannotPlant naming the defect and the file."""
    for module, source in defect.sources().items():
        try:
            graft(module, source)
        except CannotPlant as refused:
            raise CannotPlant(f"{defect.name}: {refused}") from refused


def plant_by_name(name: str) -> None:
    """`plant` for a defect of the catalogue: what a new rank is prepared with, as it travels by name."""
    from verification.mutants import by_name  # the catalogue imports this package

    plant(by_name(name))


def graft(module_name: str, source: str) -> None:
    """Make the live module, and all who imported from it, behave as this source has it.

    Functions, methods, defaults, plain constants and the generated methods of dataclasses are followed. Raises
    CannotPlant, with nothing changed in the module's structure, where statements were added or removed, where
    decorators, bases, imports or closures differ, where a function uses a name that is bound nowhere, or where the
    source says the same as before.
    """
    module = importlib.import_module(module_name)
    file = module.__file__
    assert file is not None
    with open(file) as lines:
        before = _parsed(lines.read(), module_name)
    after = _parsed(source, module_name)
    if ast.dump(before) == ast.dump(after):
        raise CannotPlant(f"{module_name}: the edited source says the same as before")
    if (here := _outline(before)) != (there := _outline(after)):
        differs = next((f"{a} / {b}" for a, b in zip(here, there, strict=False) if a != b), "their number")
        raise CannotPlant(f"{module_name}: only bodies, defaults and constants can be changed, not {differs[:200]}")
    scratch: dict[str, Any] = {"__name__": module_name, "__package__": module.__package__, "__file__": file}
    try:
        code = compile(source, file, "exec")
        exec(code, scratch)
    except Exception as error:
        raise CannotPlant(f"{module_name}: the edited source does not run: {error!r}") from error
    if missing := unbound(source, code, scratch):
        raise CannotPlant(f"{module_name}: the edited source uses what is bound nowhere: {', '.join(missing)}")
    _Graft(_changed_statements(before, after)).namespace(after, vars(module), scratch, module_name)
    clear_caches(PACKAGES)  # what they hold was computed by other code


# --- what may differ --------------------------------------------------------------------------------------------------


def _parsed(source: str, name: str) -> ast.Module:
    try:
        return ast.parse(source)
    except SyntaxError as error:
        raise CannotPlant(f"{name}: the edited source does not compile: {error}") from error


def _outline(tree: ast.Module | ast.ClassDef) -> list[str]:
    """The statements without what can be grafted: bodies and defaults of functions, values that are assigned."""
    found = []
    for statement in tree.body:
        if isinstance(statement, ast.FunctionDef):
            found.append(f"def {statement.name} {_dump(statement.decorator_list)}")
        elif isinstance(statement, ast.ClassDef):
            heads = [*statement.decorator_list, *statement.bases, *statement.keywords]
            found += [f"class {statement.name} {_dump(heads)}", *_outline(statement), "end of class"]
        elif (name := _assigned(statement)) is not None:
            found.append(f"{name} =")
        elif not _is_text(statement):
            found.append(_dump([statement]))
    return found


def _dump(nodes: list[Any]) -> str:
    return " ".join(ast.dump(node) for node in nodes)


def _assigned(statement: ast.stmt) -> str | None:
    """The name that a statement binds to a value; None for other statements."""
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1 and isinstance(statement.targets[0], ast.Name):
        return statement.targets[0].id
    if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
        return statement.target.id
    return None


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _changed_statements(before: ast.Module, after: ast.Module) -> set[int]:
    """ids of the statements of `after` that assign something else than their counterparts in `before`."""
    pairs = zip(_statements(before), _statements(after), strict=True)
    return {id(other) for one, other in pairs if ast.dump(one) != ast.dump(other)}


def _statements(tree: ast.Module | ast.ClassDef) -> Iterator[ast.stmt]:
    for statement in tree.body:
        if not _is_text(statement):
            yield statement
            if isinstance(statement, ast.ClassDef):
                yield from _statements(statement)


# --- grafting ---------------------------------------------------------------------------------------------------------


class _Graft:
    """One module's graft. changed: ids of the statements whose values are to be looked at, besides all functions."""

    def __init__(self, changed: set[int]) -> None:
        self.changed = changed

    def namespace(self, tree: ast.Module | ast.ClassDef, live: Any, new: Any, where: str) -> None:
        """Follow the statements of a module, or of a class's body, whose names are bound in `live` and `new`."""
        for statement in tree.body:
            if isinstance(statement, ast.FunctionDef):
                place = f"{where}.{statement.name}"
                if _is_accessor(statement):
                    raise CannotPlant(f"{place}: setters and deleters cannot be grafted")
                _function(live[statement.name], new[statement.name], place)
            elif isinstance(statement, ast.ClassDef):
                self.klass(statement, live[statement.name], new[statement.name], f"{where}.{statement.name}")
            elif (name := _assigned(statement)) is not None and isinstance(tree, ast.Module) and name in new:
                self.constant(name, live, new, f"{where}.{name}", id(statement) in self.changed)

    def klass(self, tree: ast.ClassDef, live: Any, new: Any, where: str) -> None:
        self.namespace(tree, vars(live), vars(new), where)
        for statement in tree.body:
            if (name := _assigned(statement)) is not None:
                self.attribute(name, live, new, statement, f"{where}.{name}")
        written = {s.name for s in tree.body if isinstance(s, ast.FunctionDef)}
        for name in _GENERATED:
            one, other = vars(live).get(name), vars(new).get(name)
            if name not in written and isinstance(one, types.FunctionType) and isinstance(other, types.FunctionType):
                if one.__code__.co_filename == other.__code__.co_filename == "<string>":
                    _function(one, other, f"{where}.{name}")

    def constant(self, name: str, live: Any, new: Any, where: str, changed: bool) -> None:
        one, other = live[name], new[name]
        if _is_plain(one) and _is_plain(other):
            if not _same(one, other):
                _rebind(name, one, other)
        elif changed:
            _object(one, other, where)

    def attribute(self, name: str, live: Any, new: Any, statement: ast.stmt, where: str) -> None:
        """Of a class. Fields of a dataclass without a default are no attributes: their generated methods tell."""
        one, other = vars(live).get(name), vars(new).get(name)
        if _is_plain(one) and _is_plain(other) and (name in vars(live)) == (name in vars(new)):
            if not _same(one, other):
                setattr(live, name, other)
            if name not in vars(new) and id(statement) in self.changed and getattr(statement, "value", None):
                raise CannotPlant(f"{where}: this field's default cannot be changed")
        elif id(statement) in self.changed:
            raise CannotPlant(f"{where}: only plain constants of a class can be changed")


def _is_accessor(statement: ast.FunctionDef) -> bool:
    return any(isinstance(d, ast.Attribute) and d.attr in ("setter", "deleter") for d in statement.decorator_list)


def _rebind(name: str, old: Any, new: Any) -> None:
    for module in modules_of(PACKAGES):
        if name in vars(module) and vars(module)[name] is old:
            setattr(module, name, new)


def _object(live: Any, new: Any, where: str) -> None:
    """A value that a changed statement assigns: a function, or a dict of functions and constants."""
    if isinstance(live, dict) and isinstance(new, dict) and list(live) == list(new):
        for key, value in new.items():
            if _is_plain(value) and _is_plain(live[key]):
                live[key] = value
            else:
                _object(live[key], value, f"{where}[{key!r}]")
    elif isinstance(live, types.FunctionType) and isinstance(new, types.FunctionType):
        _function(live, new, where)
    else:
        raise CannotPlant(f"{where}: a value of type {type(live).__name__} cannot be changed")


def _function(live: Any, new: Any, where: str) -> None:
    """Give the function behind `live` the code of the one behind `new`; both are wrapped alike."""
    if type(live) is not type(new):
        raise CannotPlant(f"{where}: a {type(live).__name__} cannot become a {type(new).__name__}")
    if isinstance(live, (staticmethod, classmethod)):
        return _function(live.__func__, new.__func__, where)
    if isinstance(live, property):
        return _function(live.fget, new.fget, where)
    if isinstance(live, functools.cached_property):
        return _function(live.func, new.func, where)
    if hasattr(live, "__wrapped__"):  # lru_cache, contextmanager: the outline says that they are the same
        return _function(live.__wrapped__, new.__wrapped__, where)
    if not isinstance(live, types.FunctionType):
        raise CannotPlant(f"{where}: a {type(live).__name__} cannot be grafted")
    if live.__code__.co_freevars != new.__code__.co_freevars:
        raise CannotPlant(
            f"{where}: its closure over {live.__code__.co_freevars} cannot become one over {new.__code__.co_freevars}"
        )
    live.__code__ = new.__code__
    live.__defaults__ = _defaults(live.__defaults__, new.__defaults__, where)
    live.__kwdefaults__ = _keyword_defaults(live.__kwdefaults__, new.__kwdefaults__, where)


def _defaults(live: tuple[Any, ...] | None, new: tuple[Any, ...] | None, where: str) -> tuple[Any, ...] | None:
    """The new defaults. Those that are objects of the scratch namespace have a counterpart among the live ones."""
    if live is None or new is None or len(live) != len(new):
        if new is not None and not all(map(_is_plain, new)):
            raise CannotPlant(f"{where}: a default that is no plain constant was added")
        return new
    return tuple(_default(one, other, where) for one, other in zip(live, new, strict=True))


def _keyword_defaults(live: dict[str, Any] | None, new: dict[str, Any] | None, where: str) -> dict[str, Any] | None:
    if new is None:
        return None
    return {name: _default((live or {}).get(name), value, where) for name, value in new.items()}


def _default(live: Any, new: Any, where: str) -> Any:
    if _is_plain(new):
        return new
    if repr(live) != repr(new):
        raise CannotPlant(f"{where}: its default {live!r} cannot become {new!r}")
    return live


def _is_plain(value: Any) -> bool:
    return type(value) in _PLAIN or (type(value) in (tuple, frozenset) and all(map(_is_plain, value)))


def _same(one: Any, other: Any) -> bool:
    """Equal, and of one type: 1 is not True, 0.0 is not -0.0."""
    return repr(one) == repr(other)
