"""Runs a notebook's cells without Jupyter; as a program, saves their outputs in it.

    python -m tests.notebook_cells examples/underflow.ipynb

The notebook then says which code its outputs come from.
"""

from __future__ import annotations

import ast
import base64
import hashlib
import io
import json
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
from matplotlib.figure import Figure

Notebook = dict[str, Any]
Output = dict[str, Any]


def load(path: Path) -> Notebook:
    notebook: Notebook = json.loads(path.read_text(encoding="utf-8"))
    return notebook


def code_cells(notebook: Notebook) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def fingerprint(notebook: Notebook) -> str:
    """Checksum of all code."""
    code = ["".join(cell["source"]) for cell in code_cells(notebook)]
    return hashlib.sha256(json.dumps(code).encode()).hexdigest()


def run(notebook: Notebook) -> tuple[list[list[Output]], dict[str, Any]]:
    """Runs all code; returns the outputs of each cell and the variables at the end."""
    matplotlib.use("Agg")
    variables: dict[str, Any] = {"__name__": "__main__"}
    return [_outputs(cell, variables) for cell in code_cells(notebook)], variables


def _outputs(cell: dict[str, Any], variables: dict[str, Any]) -> list[Output]:
    source = "".join(cell["source"])
    tree = ast.parse(source)
    # The value of a final expression is shown, unless a semicolon follows it.
    shown = None
    if isinstance(tree.body[-1], ast.Expr) and not source.endswith(";"):
        shown = ast.Expression(tree.body.pop().value)
    with redirect_stdout(io.StringIO()) as printed:
        exec(compile(tree, cell["id"], "exec"), variables)
        value = eval(compile(shown, cell["id"], "eval"), variables) if shown else None
    outputs: list[Output] = []
    if printed.getvalue():
        text = printed.getvalue().splitlines(keepends=True)
        outputs.append({"name": "stdout", "output_type": "stream", "text": text})
    if value is not None:
        outputs.append(_displayed(value))
    outputs += [_displayed(plt.figure(number)) for number in plt.get_fignums()]
    plt.close("all")
    return outputs


def _displayed(value: object) -> Output:
    data: dict[str, Any] = {"text/plain": [repr(value)]}
    if isinstance(value, Figure):
        picture = io.BytesIO()
        value.savefig(picture, format="png", metadata={"Software": None})
        data["image/png"] = base64.b64encode(picture.getvalue()).decode()
    return {"data": data, "metadata": {}, "output_type": "display_data"}


def save(path: Path) -> None:
    """Runs a notebook and writes it again with its outputs."""
    notebook = load(path)
    outputs, _ = run(notebook)
    for count, (cell, each) in enumerate(zip(code_cells(notebook), outputs, strict=True), 1):
        cell["execution_count"], cell["outputs"] = count, each
    notebook["metadata"]["outputs_of"] = fingerprint(notebook)
    text = json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True)
    path.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    save(Path(sys.argv[1]))
