"""Output files of a run: kept after each part, completed at the end."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from pathlib import Path

from . import page, plot, whole_files
from .results import Results

JSON = "results.json"
CSV = "results.csv"
PAGE = "report.html"
PLOTS = "plots"
EARLIER = "earlier"

Write = Callable[[Path], None]


class Outputs:
    """Result files; one that cannot be written is reported once and stops nothing.

    Args:
        tell: Prints a line.
        folder: Existing directory for files of all kinds.
        json: Another file for rows and goals.
        csv: Another file for rows.
        picture: Another file for the kernels' pictures.
    """

    def __init__(
        self,
        tell: Callable[[str], object],
        folder: Path | None = None,
        json: Path | None = None,
        csv: Path | None = None,
        picture: Path | None = None,
    ) -> None:
        self._tell = tell
        self._folder = folder
        self._json, self._csv, self._picture = json, csv, picture
        self._begun = False
        self._told: set[str] = set()

    @property
    def failed(self) -> bool:
        """Whether a file could not be written."""
        return bool(self._told)

    def keep(self, results: Results) -> None:
        """Writes the rows so far, so that nothing is lost if the process is killed."""
        # A run without measurements does not replace an earlier one, or put it away.
        if self._json is not None and (results.rows or not self._json.exists()):
            self._write(self._json, results.write_json)
        if self._folder is not None and results.rows:
            if not self._begun:
                self._begun = self._write(self._folder / JSON, put_away)
            if not self._begun:
                return
            self._write(self._folder / JSON, results.write_json)
            self._write(self._folder / PAGE, lambda path: page.write([results], path))

    def finish(self, results: Results) -> None:
        """Writes everything."""
        self.keep(results)
        if self._csv is not None and (results.rows or not self._csv.exists()):
            self._write(self._csv, results.write_csv)
        if self._picture is not None:
            self._write(self._picture, lambda path: plot.draw(results, path))
        if self._folder is not None and self._begun:
            found = [picture for of in plot.pictures(results).values() for picture in of]
            self._write(self._folder / CSV, results.write_csv)
            self._write(self._folder / PLOTS, lambda path: plot.write_all(found, path))
            self._tell(f"the report is {self._folder / PAGE}")

    def _write(self, path: Path, write: Write) -> bool:
        try:
            write(path)
            return True
        except (OSError, ValueError) as error:
            text = f"{path} was not written: {whole_files.reason(error)}"
            if text not in self._told:
                self._told.add(text)
                self._tell(text)
            return False


def put_away(file: Path) -> None:
    """Renames an earlier run's file, if any, to a name that no run writes."""
    if file.exists():
        written = datetime.datetime.fromtimestamp(file.stat().st_mtime, datetime.timezone.utc)
        folder = file.parent / EARLIER
        folder.mkdir(exist_ok=True)
        file.replace(folder / f"{written:%Y-%m-%d-%H%M%S}{file.suffix}")
