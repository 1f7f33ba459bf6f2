"""Small changes of a source text, made by cosmic-ray: which, and which not.

cosmic-ray 8 finds the places and writes the text. Of its operators these are used:

- every number one more and one less; True and False, `and` and `or`, `continue` and `break` exchanged; `not` before
  every condition, and every `not`, minus and `~` left out; minus made `~`; every decorator left out; the body of every
  `for` loop left out; every exception that is caught replaced;
- comparisons: the two that no other replacement subsumes, and the negation of `==` and `is` (Kaminski, Ammann, Offutt,
  "Improving logic-based testing", 2013: of `<` these are `<=` and `!=`);
- binary operators: two in place of eleven. What the other nine compute, most often another type, is seen by whatever
  sees these.

Not used: operators that take arguments (there is nothing to give them), identity in place of an order of numbers (the
wrong type, seen at once), and what says the same: unary plus for minus left out, `not -x` for a changed condition.

A change that does nothing at run time is none: in annotations, in the text of an error or of an assertion. Changes that
give the same program count once.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
_SPACE = re.compile(r"(?:(?<=[(\[])|(?<=\w=)) (?=-?\d)")  # cosmic-ray puts one before every number that it changes

_BINARY = {
    "Add": ("Sub", "Mul"), "Sub": ("Add", "Mul"), "Mul": ("Add", "FloorDiv"), "Div": ("Mul", "FloorDiv"),
    "FloorDiv": ("Mul", "Mod"), "Mod": ("FloorDiv", "Mul"), "Pow": ("Mul", "Add"), "BitAnd": ("BitOr", "BitXor"),
    "BitOr": ("BitAnd", "BitXor"), "BitXor": ("BitAnd", "BitOr"), "LShift": ("RShift", "Add"),
    "RShift": ("LShift", "Add"),
}  # fmt: skip
_COMPARISON = {
    "Lt": ("LtE", "NotEq"), "LtE": ("Lt", "Eq"), "Gt": ("GtE", "NotEq"), "GtE": ("Gt", "Eq"),
    "Eq": ("NotEq", "LtE", "GtE"), "NotEq": ("Eq", "Lt", "Gt"), "Is": ("IsNot",), "IsNot": ("Is",),
}  # fmt: skip
_OTHERS = (
    "NumberReplacer", "AddNot", "ReplaceTrueWithFalse", "ReplaceFalseWithTrue", "ReplaceAndWithOr", "ReplaceOrWithAnd",
    "ReplaceContinueWithBreak", "ReplaceBreakWithContinue", "ZeroIterationForLoop", "RemoveDecorator",
    "ExceptionReplacer", "ReplaceUnaryOperator_Delete_USub", "ReplaceUnaryOperator_USub_Invert",
    "ReplaceUnaryOperator_Delete_Not", "ReplaceUnaryOperator_Delete_Invert",
)  # fmt: skip
OPERATORS = (
    *_OTHERS,
    *(f"ReplaceBinaryOperator_{was}_{to}" for was, become in _BINARY.items() for to in become),
    *(f"ReplaceComparisonOperator_{was}_{to}" for was, become in _COMPARISON.items() for to in become),
)


class NoGenerator(Exception):
    """cosmic-ray is not installed, or lacks an operator: a fault of the set-up, no verdict."""


@dataclass(frozen=True)
class Mutation:
    """One change. file: "ring/strided_view.py"; function: the innermost that holds the line, "" for the module itself.

    before, after: the first line that differs, without its indentation; `after` is "" for a line that is gone.
    """

    file: str
    line: int
    function: str
    operator: str
    before: str
    after: str
    source: str

    @property
    def module(self) -> str:
        return self.file.removesuffix(".py").replace("/", ".")

    @property
    def key(self) -> str:
        """The same for the same changed text of the same file."""
        return hashlib.blake2b(f"{self.file}\0{self.source}".encode(), digest_size=12).hexdigest()

    def described(self) -> dict[str, Any]:
        """All but the source, and the key."""
        return {name: value for name, value in asdict(self).items() if name != "source"} | {"key": self.key}


def mutations_of(file: str) -> list[Mutation]:
    """All of a file of the project, by line. Raises NoGenerator."""
    source = (ROOT / file).read_text()
    found = []
    for before, part, after in _statements(source):  # each by itself: to parse the whole file each time takes minutes
        seen = {_program(part)}
        plain = _meaning(part)
        for operator, text in _texts(part):
            try:
                program = _program(text)
            except SyntaxError:
                continue  # what does not even parse is no program
            if program in seen or _meaning(text) == plain:
                continue
            seen.add(program)
            found.append(mutation(file, source, before + text + after, operator))
    return sorted(found, key=lambda change: change.line)


def _statements(source: str) -> Iterator[tuple[str, str, str]]:
    """Every statement of a module, with the comments above it: the text before, its own, the text after."""
    lines = source.splitlines(keepends=True)
    begin = 0
    for node in ast.parse(source).body:
        end = node.end_lineno or node.lineno
        yield "".join(lines[:begin]), "".join(lines[begin:end]), "".join(lines[end:])
        begin = end


def mutation(file: str, source: str, text: str, operator: str) -> Mutation:
    """The change that makes `text` of the `source` of a file."""
    old, new = source.splitlines(), text.splitlines()
    gone = len(old) - len(new)
    line = next((i for i, (one, other) in enumerate(zip(old, new, strict=False)) if one != other), len(new) - 1)
    if gone > 0:  # a decorator, with the blank lines and comments above it
        line += gone - 1
    after = "" if gone > 0 else _SPACE.sub("", new[line].strip())
    return Mutation(file, line + 1, _function_at(ast.parse(source), line + 1), operator, old[line].strip(), after, text)


def _texts(source: str) -> Iterator[tuple[str, str]]:
    """(operator, changed text) for every place."""
    try:
        plugins: Any = importlib.import_module("cosmic_ray.plugins")
        trees: Any = importlib.import_module("cosmic_ray.ast")
        mutating: Any = importlib.import_module("cosmic_ray.mutating")
    except ImportError as error:
        raise NoGenerator(f"{error}; install it with: python -m pip install -r requirements-mutate.txt") from error
    nodes = list(trees.ast_nodes(trees.get_ast(source)))
    for name in OPERATORS:
        try:
            operator = plugins.get_operator(f"core/{name}")()
        except KeyError as error:
            raise NoGenerator(
                f"cosmic-ray has no operator {name}; requirements-mutate.txt has the right one"
            ) from error
        places = sum(1 for node in nodes for _ in operator.mutation_positions(node))
        for occurrence in range(places):
            text = mutating.mutate_code(source, operator, occurrence)
            if text is not None:
                yield name, text


# --- what a change says -----------------------------------------------------------------------------------------------


_OPPOSITES: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip


class _Plain(ast.NodeTransformer):
    """`not a is b` as `a is not b`, and the like: of two ways to say the same, one."""

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        inner = self.visit(node.operand)
        if isinstance(node.op, ast.Not) and isinstance(inner, ast.Compare) and len(inner.ops) == 1:
            opposite = _OPPOSITES.get(type(inner.ops[0]))
            if opposite is not None:
                return ast.Compare(inner.left, [opposite()], inner.comparators)
        node.operand = inner
        return node


def _program(source: str) -> str:
    """Equal for texts that are the same program."""
    return ast.unparse(ast.fix_missing_locations(_Plain().visit(ast.parse(source))))


class _Silence(ast.NodeTransformer):
    """Takes out what does nothing at run time, and the wording of errors."""

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.annotation = None
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        return self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        node.annotation = ast.Name("object", ast.Load())
        return self.generic_visit(node)

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        node.msg = None
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if isinstance(node.func, ast.Name) and (node.func.id.endswith("Error") or node.func.id == "kind"):
            node.args = [ast.Constant("text") if isinstance(arg, ast.JoinedStr) else arg for arg in node.args]
        return self.generic_visit(node)


def _meaning(source: str) -> str:
    return ast.dump(_Silence().visit(ast.parse(source)))


def _function_at(tree: ast.Module, line: int) -> str:
    """Names of the classes and functions around a line, decorators included, joined by dots."""
    names: list[str] = []
    body: list[ast.stmt] = tree.body
    while True:
        for node in body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                if first <= line <= (node.end_lineno or node.lineno):
                    names.append(node.name)
                    body = node.body
                    break
        else:
            return ".".join(names)
