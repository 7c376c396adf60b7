"""Runs a notebook in a kernel of this interpreter; as a program, saves its outputs in it.

python -m tests.project.notebooks examples/underflow.ipynb
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient


def digest(notebook: nbformat.NotebookNode) -> str:
    """Digest of the code, saved beside its outputs."""
    cells = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    return hashlib.sha256("\n\n".join(cells).encode()).hexdigest()


def executed(path: Path, *more: str) -> nbformat.NotebookNode:
    """The notebook with its outputs, after running its cells and `more` code."""
    notebook = nbformat.read(path, as_version=4)
    cells = notebook.cells
    notebook.cells = [*cells, *map(nbformat.v4.new_code_cell, more)]
    # The kernel starts in this folder, whose ampfast it imports.
    client = NotebookClient(notebook, timeout=600, record_timing=False, coalesce_streams=True)
    client.execute()
    notebook.cells = cells
    # Of this interpreter.
    notebook.metadata.language_info = {"name": "python"}
    notebook.metadata.code_sha256 = digest(notebook)
    return notebook


if __name__ == "__main__":
    nbformat.write(executed(Path(sys.argv[1])), sys.argv[1])
