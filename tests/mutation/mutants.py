"""Mutants of a module's source, each of which some test should notice."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType

# The state machine and master weights, from the root of the repository.
FILES = (
    "ampfast/capture.py",
    "ampfast/diagnostics.py",
    "ampfast/fused_step.py",
    "ampfast/grad_scaler.py",
    "ampfast/passes.py",
    "ampfast/hooked_step.py",
    "ampfast/loss_scale.py",
    "ampfast/master_weights.py",
    "ampfast/optimizers.py",
    "ampfast/policies.py",
    "ampfast/spikes.py",
    "ampfast/turn.py",
)

_OTHER_OPERATOR: dict[type[ast.AST], type[ast.AST]] = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
}
_OTHER_FUNCTION = {"min": "max", "max": "min", "any": "all", "all": "any"}
_NEGATED_ANYWAY = (ast.Eq, ast.NotEq, ast.Is, ast.IsNot, ast.In, ast.NotIn)


@dataclass(frozen=True)
class Mutant:
    """A single change.

    Attributes:
        path: The file.
        place: Qualified name of the function; empty for the module.
        before: Original source, as `ast.unparse` writes it.
        after: Its replacement.
        lines: Lines of the statement, or of the head of a compound one.
        is_run_at_import: Whether it is outside of functions, or a default argument.
        nth: Number, from 1, among equal changes in that place.
        number: Number among all changes of the module.
    """

    path: Path
    place: str
    before: str
    after: str
    lines: range
    is_run_at_import: bool
    nth: int
    number: int

    @property
    def key(self) -> tuple[str, str, str, int]:
        """Name that is stable while the function is unchanged, also if it moves to another file."""
        return self.place, self.before, self.after, self.nth

    def compiled(self) -> CodeType:
        """Code of the module with the change."""
        tree = ast.parse(self.path.read_text(encoding="utf-8"))
        change = list(_changes(tree))[self.number]
        setattr(change.parent, change.field, change.new)
        return compile(ast.fix_missing_locations(tree), str(self.path), "exec", dont_inherit=True)


def mutants_of(path: Path) -> list[Mutant]:
    """Returns every change to the module at `path`, in source order."""
    found: list[Mutant] = []
    seen: Counter[tuple[str, str, str]] = Counter()
    for number, change in enumerate(_changes(ast.parse(path.read_text(encoding="utf-8")))):
        reads = change.place, ast.unparse(change.old), _shown(change.shown)
        seen[reads] += 1
        lines = range(change.lines[0], change.lines[1] + 1)
        found.append(Mutant(path, *reads, lines, change.is_run_at_import, seen[reads], number))
    return found


@dataclass(frozen=True)
class _Change:
    parent: ast.AST
    field: str
    new: object  # of the field
    old: ast.AST
    shown: ast.AST | None
    place: str
    lines: tuple[int, int]
    is_run_at_import: bool


@dataclass(frozen=True)
class _Where:
    place: tuple[str, ...] = ()
    lines: tuple[int, int] = (0, 0)
    is_run_at_import: bool = True


def _shown(node: ast.AST | None) -> str:
    return "nothing" if node is None else ast.unparse(node)


def _changes(tree: ast.Module) -> Iterator[_Change]:
    yield from _below(tree, _Where())


def _below(node: ast.AST, where: _Where) -> Iterator[_Change]:
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list"):
            continue
        children = value if isinstance(value, list) else [value]
        for index, child in enumerate(children):
            if not isinstance(child, ast.AST) or _is_left_alone(child):
                continue
            here = _inside(child, where)
            for new in _variants(child, node):
                replaced: object = new
                if isinstance(value, list):
                    replaced = [*value[:index], _instead(child, new), *value[index + 1 :]]
                yield _Change(
                    *(node, field, replaced, child, new),
                    *(".".join(here.place), here.lines, here.is_run_at_import),
                )
            yield from _below(child, here)


def _instead(old: ast.AST, new: ast.AST | None) -> ast.AST:
    """Replacement in a list of statements.

    A dropped statement stays as dead code, so that its function closes over the same names.
    """
    if isinstance(old, ast.stmt):
        body: list[ast.stmt] = [new] if isinstance(new, ast.stmt) else [ast.Pass()]
        return ast.If(ast.Constant(True), body, [old])
    if new is None:
        raise TypeError(f"{ast.unparse(old)} cannot be left out")
    return new


def _inside(node: ast.AST, where: _Where) -> _Where:
    place, lines, is_run_at_import = where.place, where.lines, where.is_run_at_import
    if isinstance(node, ast.stmt):
        body = getattr(node, "body", None)
        end = body[0].lineno - 1 if body else node.end_lineno or node.lineno
        lines = (node.lineno, max(node.lineno, end))
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        place = (*place, node.name)
        is_run_at_import = isinstance(node, ast.ClassDef)
    elif isinstance(node, ast.arguments):
        is_run_at_import = True
    return _Where(place, lines, is_run_at_import)


def _is_left_alone(node: ast.AST) -> bool:
    """Whether a node is a text or only used for types."""
    if isinstance(node, ast.If):
        return ast.unparse(node.test) == "TYPE_CHECKING"
    if isinstance(node, ast.Assign):
        return ast.unparse(node.targets[0]) == "__all__" or "TypeVar(" in ast.unparse(node)
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return is_text or isinstance(node, (ast.JoinedStr, ast.Import, ast.ImportFrom))


def _variants(node: ast.AST, parent: ast.AST) -> Iterator[ast.AST | None]:
    """Replacements for `node`; None drops a statement."""
    tested = isinstance(parent, (ast.If, ast.While)) and node is parent.test
    if tested and not _is_negated_anyway(node):
        yield ast.UnaryOp(ast.Not(), node)  # type: ignore[arg-type]

    if isinstance(node, ast.Constant):
        if isinstance(node.value, bool):
            yield ast.Constant(not node.value)
        elif isinstance(node.value, (int, float)):
            yield ast.Constant(node.value + 1)
    elif isinstance(node, ast.Compare):
        for index, operator in enumerate(node.ops):
            if other := _OTHER_OPERATOR.get(type(operator)):
                ops = [*node.ops[:index], other(), *node.ops[index + 1 :]]
                yield ast.Compare(node.left, ops, node.comparators)  # type: ignore[arg-type]
    elif isinstance(node, ast.BinOp):
        if other := _OTHER_OPERATOR.get(type(node.op)):
            yield ast.BinOp(node.left, other(), node.right)  # type: ignore[arg-type]
    elif isinstance(node, ast.BoolOp):
        for index in range(len(node.values)):
            rest = [*node.values[:index], *node.values[index + 1 :]]
            yield ast.BoolOp(node.op, rest) if len(rest) > 1 else rest[0]
    elif isinstance(node, ast.UnaryOp):
        if isinstance(node.op, ast.Not):
            yield node.operand
    elif isinstance(node, ast.IfExp):
        yield node.body
        yield node.orelse
    elif isinstance(node, ast.Name):
        is_called = isinstance(parent, ast.Call) and node is parent.func
        if is_called and node.id in _OTHER_FUNCTION:
            yield ast.Name(_OTHER_FUNCTION[node.id], ast.Load())
    elif isinstance(node, ast.Return):
        if node.value is not None and ast.unparse(node.value) != "None":
            yield ast.Return(ast.Constant(None))
    elif isinstance(node, ast.Assign):
        if all(isinstance(target, (ast.Attribute, ast.Subscript)) for target in node.targets):
            yield None
    elif isinstance(
        node, (ast.AugAssign, ast.Break, ast.Continue, ast.Delete, ast.Expr, ast.Raise)
    ):
        yield None


def _is_negated_anyway(node: ast.AST) -> bool:
    if isinstance(node, ast.Compare):
        return len(node.ops) == 1 and isinstance(node.ops[0], _NEGATED_ANYWAY)
    return isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)
