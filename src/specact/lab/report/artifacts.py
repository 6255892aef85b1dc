"""Where the files beside a page go, and links to them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

from specact.files import write_whole
from specact.lab.report.drawing import Drawing, Rows, as_csv, save
from specact.lab.report.html import Html, fill, html, join


@dataclass(frozen=True)
class ArtifactWriter:
    """Writes figures and tables, and remembers which.

    Attributes:
        page: the report.
        folder: of everything beside it.
        written: the files so far.
    """

    page: Path
    folder: Path
    written: list[Path] = field(default_factory=list)

    def figure(self, drawing: Drawing, slug: str) -> Html:
        """The figure as part of the page, with links to its files."""
        svg, paths = save(drawing, self.folder, f"{slug}-{drawing.name}")
        return fill("figure.html", title=drawing.title, svg=svg, caption=drawing.caption, links=self._links(paths))

    def table(self, stem: str, rows: Rows) -> Html:
        """A link to the rows as CSV; nothing if there are none."""
        if not rows:
            return Html()
        path = self.folder / f"{stem}.csv"
        write_whole(path, as_csv(rows))
        return Html(f'<p class="files">{self._links([path])}</p>')

    def _links(self, paths: Sequence[Path]) -> Html:
        self.written.extend(paths)
        base = self.page.resolve().parent
        targets = (quote(Path(os.path.relpath(path.resolve(), base)).as_posix()) for path in paths)
        return join(
            Html(f'<a href="{html(target)}">{path.suffix[1:].upper()}</a> ')
            for target, path in zip(targets, paths, strict=True)
        )
