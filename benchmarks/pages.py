"""Tables that benchmarks write into README and docs, each between two marks of its name."""

from pathlib import Path


def fill(page: Path, name: str, table: str) -> None:
    """Puts a table between its marks; a page without them stays as it is."""
    opening, closing = f"<!-- {name} -->\n", f"<!-- end of {name} -->\n"
    text = page.read_text()
    if opening in text:
        before, rest = text.split(opening)
        page.write_text(f"{before}{opening}{table}\n{closing}{rest.partition(closing)[2]}")
