"""Terminal output of a run: with rich if installed, else plain lines."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Protocol

from .harness import Job
from .report import COLOURS, Table

try:
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
    )
    from rich.table import Table as RichTable
except ModuleNotFoundError:
    Console = None

PAGE_WIDTH = 160
NamedJob = tuple[str, Job]


class Terminal(Protocol):
    """Output of lines, tables and progress."""

    def line(self, text: str) -> None: ...

    def table(self, table: Table) -> None: ...

    def progress(self, jobs: Sequence[NamedJob]) -> Iterator[NamedJob]: ...


class PlainTerminal:
    """A line for each job, and tables without colours."""

    def line(self, text: str) -> None:
        print(text, flush=True)

    def table(self, table: Table) -> None:
        self.line(f"\n{table.plain()}")

    def progress(self, jobs: Sequence[NamedJob]) -> Iterator[NamedJob]:
        return _line_by_line(jobs, self)


class RichTerminal:
    """Progress bar and coloured tables; in a log a line for each job."""

    def __init__(self) -> None:
        self._console = Console(width=None if sys.stdout.isatty() else PAGE_WIDTH)

    def line(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False)

    def table(self, table: Table) -> None:
        drawn = RichTable(title=escape(table.title), title_justify="left")
        for name in table.names:
            drawn.add_column(name)
        for name in table.numbers:
            drawn.add_column(name, justify="right")
        for number, cells in enumerate(table.lines, 1):
            drawn.add_row(
                *(
                    f"[{COLOURS[cell]}]{cell}[/]" if cell in COLOURS else escape(cell)
                    for cell in cells
                ),
                end_section=number in table.sections,
            )
        self._console.print(drawn)

    def progress(self, jobs: Sequence[NamedJob]) -> Iterator[NamedJob]:
        if not self._console.is_terminal:
            # A log, which cannot show a moving bar.
            yield from _line_by_line(jobs, self)
            return
        columns = (
            TextColumn("{task.description:<48}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=self._console, transient=True) as progress:
            task = progress.add_task("", total=len(jobs))
            for name, job in jobs:
                progress.update(task, description=name)
                yield name, job
                progress.advance(task)


def _line_by_line(jobs: Sequence[NamedJob], terminal: Terminal) -> Iterator[NamedJob]:
    for number, (name, job) in enumerate(jobs, 1):
        terminal.line(f"[{number}/{len(jobs)}] {name}")
        yield name, job


def make() -> Terminal:
    """Terminal supported by this installation."""
    return PlainTerminal() if Console is None else RichTerminal()
