"""Layers of imports: package, scaler, its components, backends."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from ampfast import errors

ROOT = Path(__file__).parents[1]


def named(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


FILES = {named(path): path for path in (ROOT / "ampfast").rglob("*.py")}


def only_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def walk(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if not only_for_types(child):
            yield child
            yield from walk(child)


def imports(path: Path) -> set[str]:
    """Modules imported anywhere in a file, but for type checking."""
    found = set()
    for node in walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                is_module = full in FILES or alias.name == "_C"
                found.add(full if is_module else str(node.module))
    return found


IMPORTS = {name: imports(path) for name, path in FILES.items()}

# Layers from the top; a module imports from its own and lower ones. A trailing dot stands for the
# modules of a package.
LAYERS = (
    ("__main__", "demo", "info"),
    ("",),
    ("patch",),
    ("functional", "grad_scaler", "lr_scheduler", "fsdp", "sync_free"),
    ("clipping", "distributed", "gradients", "loss_scale", "optimizers", "overflow", "report"),
    ("backends", "backends."),
    ("_version", "errors"),
)


def layers_of(module: str) -> list[int]:
    name = module.removeprefix("ampfast").removeprefix(".")
    return [
        number
        for number, layer in enumerate(LAYERS)
        if any(name == entry or (entry.endswith(".") and name.startswith(entry)) for entry in layer)
    ]


def importers_of(module: str) -> set[str]:
    return {name for name, found in IMPORTS.items() if module in found}


def test_there_are_no_circles() -> None:
    # Only commands import the package's `ampfast` itself.
    inside = {name: found & (FILES.keys() - {"ampfast"}) for name, found in IMPORTS.items()}
    order = list(TopologicalSorter(inside).static_order())
    assert len(order) == len(FILES)


def test_every_module_has_its_layer() -> None:
    assert {name: len(layers_of(name)) for name in FILES} == dict.fromkeys(FILES, 1)
    entries = [entry for layer in LAYERS for entry in layer if not entry.endswith(".")]
    assert {"ampfast" + (entry and f".{entry}") for entry in entries} <= FILES.keys()


@pytest.mark.parametrize("name", sorted(FILES))
def test_nothing_from_the_layers_above(name: str) -> None:
    (own,) = layers_of(name)
    inside = IMPORTS[name] & FILES.keys()
    assert [module for module in sorted(inside) if layers_of(module)[0] < own] == []


def test_only_commands_import_the_face() -> None:
    assert importers_of("ampfast") == {"ampfast.__main__", "ampfast.demo", "ampfast.info"}


def test_who_imports_the_scaler() -> None:
    assert importers_of("ampfast.grad_scaler") <= {"ampfast", "ampfast.fsdp", "ampfast.patch"}


@pytest.mark.parametrize("name", sorted(n for n in FILES if n.startswith("ampfast.backends")))
def test_backends_import_nothing_above_them(name: str) -> None:
    ours = {module for module in IMPORTS[name] if module.split(".")[0] == "ampfast"}
    allowed = {"ampfast._C", "ampfast.errors"}
    assert {m for m in ours if not m.startswith("ampfast.backends")} <= allowed


def test_backends_do_not_know_each_other() -> None:
    """`cpu` binds the core, which compiled backends need; the choice loads the others by name."""
    for backend in ("aten", "cuda", "triton"):
        own = f"ampfast.backends.{backend}"
        others = {f"ampfast.backends.{o}" for o in ("aten", "cuda", "triton")} - {own}
        inside = [name for name in FILES if name == own or name.startswith(f"{own}.")]
        assert inside
        for name in inside:
            assert not {m for m in IMPORTS[name] if m in others}, name


def test_the_compiled_core_is_bound_in_two_places() -> None:
    assert importers_of("ampfast._C") == {"ampfast.backends.cuda", "ampfast.backends.cpu"}


def test_device_code_knows_no_host() -> None:
    # The core provides the layouts of data for the kernels.
    known = {"triton", "triton.language", "ampfast.backends.cpu"}
    assert IMPORTS["ampfast.backends.triton.kernels"] <= known


def test_warnings_pass_by_every_module_that_gives_one() -> None:
    """Warnings point at the caller's line, so `errors` lists the scaler's modules."""
    listed = {name for name in errors._SCALER_MODULES if name.startswith("ampfast")}
    assert listed <= FILES.keys()
    calls = {name for name, path in FILES.items() if "warn_caller(" in path.read_text("utf-8")}
    assert calls - {"ampfast.errors"} <= listed


def test_triton_is_imported_in_one_folder() -> None:
    users = {
        name for name, found in IMPORTS.items() if any(m.split(".")[0] == "triton" for m in found)
    }
    assert users
    assert all(name.startswith("ampfast.backends.triton.") for name in users)
