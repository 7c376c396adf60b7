"""Docstrings of public names: arguments, results and errors."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import textwrap
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any

import pytest

import ampfast
from ampfast import backends, callbacks, functional, report

MODULES = (ampfast, backends, callbacks, functional, report)


def exported(module: ModuleType) -> Iterator[tuple[str, Any]]:
    for name in module.__all__:
        yield name, getattr(module, name)


def methods(name: str, kind: type) -> Iterator[tuple[str, Any]]:
    """Public methods of a class of ours and of its bases in ampfast."""
    for attribute in dir(kind):
        value = inspect.getattr_static(kind, attribute)
        function = value.fget if isinstance(value, property) else inspect.unwrap(value)
        function = getattr(function, "__func__", function)  # of a class method
        if attribute.startswith("_") or not isinstance(function, FunctionType):
            continue
        if function.__module__.startswith("ampfast"):
            yield f"{name}.{attribute}", value


CLASSES = {n: v for m in MODULES for n, v in exported(m) if isinstance(v, type)}
FUNCTIONS = {
    **{n: v for m in MODULES for n, v in exported(m) if isinstance(v, FunctionType)},
    **{n: v for name, kind in CLASSES.items() for n, v in methods(name, kind)},
}


def sections(docstring: str | None) -> dict[str, str]:
    """Text under each heading, and under "" the text before them."""
    parts = re.split(r"^(\w+):\n", inspect.cleandoc(docstring or ""), flags=re.MULTILINE)
    return {"": parts[0], **dict(zip(parts[1::2], parts[2::2], strict=True))}


def listed(section: str) -> set[str]:
    """Names explained in a section."""
    return set(re.findall(r"^    \*{0,2}(\w+): \S", section, re.MULTILINE))


def parameters(function: Any) -> set[str]:
    return set(inspect.signature(function).parameters) - {"self", "cls"}


def raised(function: Any, seen: frozenset[str] = frozenset()) -> set[str]:
    """Errors raised by a function or by helpers of its module that it calls."""
    function = inspect.unwrap(function)
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            call = node.exc
            while call.args and isinstance(call.args[0], ast.Call):
                call = call.args[0]  # of add_note
            found.add(ast.unparse(call.func))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            helper = node.func.id if node.func.id.startswith("_") else None
            called = function.__globals__.get(helper)
            is_near = getattr(called, "__module__", None) == function.__module__
            if is_near and isinstance(called, FunctionType) and called.__name__ not in seen:
                found |= raised(called, seen | {called.__name__})
    return {name for name in found if name.endswith(("Error", "Exception"))}


@pytest.mark.parametrize("name", CLASSES)
def test_classes(name: str) -> None:
    kind = CLASSES[name]
    said = sections(kind.__doc__)
    assert said[""].strip()
    if dataclasses.is_dataclass(kind):
        assert listed(said.get("Attributes", "")) == {
            f.name for f in dataclasses.fields(kind) if not f.name.startswith("_")
        }
    elif "__init__" in vars(kind) and not getattr(kind, "_is_protocol", False):
        if parameters(kind) and not name.startswith(("Patch", "Guarded")):
            assert listed(said["Args"]) == parameters(kind)
        missing = raised(vars(kind)["__init__"]) - listed(said.get("Raises", ""))
        assert missing == set()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name: str) -> None:
    function = FUNCTIONS[name]
    is_property = isinstance(function, property)
    function = getattr(function, "__func__", function)
    function = inspect.unwrap(function.fget if is_property else function)
    said = sections(function.__doc__)
    assert said[""].strip()
    if not is_property:
        assert listed(said.get("Args", "")) == parameters(function)
    returns = inspect.signature(function).return_annotation
    if not is_property and returns not in (None, "None"):
        assert "Returns" in said or said[""].startswith("Returns"), "what does it return?"
    assert raised(function) - listed(said.get("Raises", "")) == set()
