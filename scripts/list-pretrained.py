"""Writes pretrained/README.md: the bundles, what made them, their sizes and fingerprints.

A bundle that is removed from pretrained/ is listed from pretrained/absent.json; write its line there before. What the
page says from ``## Names`` on is written by hand, and stays.
"""

import hashlib
import json
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PRETRAINED = ROOT / "pretrained"
HEAD = """# Pretrained bundles

Written by `python scripts/list-pretrained.py`. [NOTICE](../NOTICE) says what each was trained on,
and [CONTRIBUTING.md](../CONTRIBUTING.md) how they are made again. Training gives other bits on another processor, so
published numbers are of these files. MB are those of a bundle's folder, all together {total} MB; one that shares a part
of the folder beside it needs that folder as well. `specact export` copies a bundle with all of its parts. The wheel
holds `ball` and `ball-chase-flow`.

| bundle | what | recipe | MB | fingerprint |
|---|---|---|---|---|
"""
ABSENT = """
Not in a checkout, because only studies need them; one that shares a part brings the other bundle along:

| bundle | MB | fingerprint | made by |
|---|---|---|---|
"""
AFTER = """
The script takes a bundle from the history of the repository where it has it, with the weights that published numbers
are of. Otherwise, as in a shallow clone, it trains the recipe; `AGAIN=1` always does.

"""


def recipes() -> dict[str, str]:
    """File of the recipe that makes a bundle, by the bundle's name."""
    made = {}
    for file in sorted((ROOT / "recipes").glob("*.toml")):
        recipe = tomllib.loads(file.read_text())
        for name in recipe.get("bundles", [recipe.get("bundle")]):
            made[name] = file.name
            made[f"{name}-distilled"] = file.name
    return made


def fingerprint(folder: Path) -> str:
    """Of all parts together, as `specact` compares it."""
    parts = json.loads((folder / "manifest.json").read_text())["fingerprints"]
    return hashlib.sha256("".join(parts.values()).encode()).hexdigest()[:16]


def megabytes(size: float) -> str:
    return f"{size / 1e6:.1f}"


def page() -> str:
    """The text of pretrained/README.md."""
    made_by, absent = recipes(), json.loads((PRETRAINED / "absent.json").read_text())
    present = sorted(
        {file.parent for file in PRETRAINED.glob("*/manifest.json")} - {PRETRAINED / name for name in absent}
    )
    rows, total = [], 0
    for folder in present:
        files = [file for file in folder.rglob("*") if file.is_file()]
        size = sum(file.stat().st_size for file in files)
        total += size
        inside = sorted(file.parent.name for file in folder.glob("*/manifest.json"))
        manifest = json.loads((folder / "manifest.json").read_text())
        what = manifest.get("kind", "pair") + (f", with {' and '.join(inside)}" if inside else "")
        what += "".join(f", {part} of {other}" for part, other in manifest.get("shared", {}).items())
        recipe = made_by[folder.name]
        rows.append(
            f"| `{folder.name}` | {what} | [{recipe}](../recipes/{recipe}) | {megabytes(size)} "
            f"| `{fingerprint(folder)}` |\n"
        )
    gone = (
        f"| `{name}` | {megabytes(said['bytes'])} | `{said['fingerprint']}` | `scripts/make-pretrained {name}` |\n"
        for name, said in sorted(absent.items())
    )
    head = HEAD.format(total=megabytes(total))
    written = (PRETRAINED / "README.md").read_text()
    return "".join([head, *rows, ABSENT, *gone, AFTER, written[written.index("## Names") :]])


if __name__ == "__main__":
    (PRETRAINED / "README.md").write_text(page())
