"""What the site makes of the repository: pages that include others, links out of docs/, and the reference.

A hook of MkDocs, see mkdocs.yml. Each version has a folder of its own, which the theme's selector lists from
``versions.json`` beside them; ``index.html`` there leads to the newest. Three things differ between the repository's
web view and the site:

- A line that is nothing but ``[text](../FILE#section "included")`` is a link there, and the section itself here, from
  its heading to the next one; the whole file, without a section.
- A link to a file outside docs/ leads to the page that includes it, or else to a page below ``source/`` that shows it.
- The reference is made from the command line's parser and from what packages export.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import posixpath
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import griffe
from markdown import Markdown
from markdown.extensions import Extension
from markdown.extensions.toc import slugify
from markdown.inlinepatterns import InlineProcessor
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.plugins import get_plugin_logger
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from specact import __version__

ROOT = Path(__file__).parents[1]
# Modules that are public as a whole; packages with a stub beside their __init__ export what stands in it.
MODULES = (
    "specact.contracts", "specact.errors", "specact.families.codes.sampling", "specact.lab.envs.task",
    "specact.lab.train.recipe", "specact.observation", "specact.pair", "specact.rng", "specact.systems.flash",
    "specact.systems.flow", "specact.systems.freqcache", "specact.systems.roboecc", "specact.systems.staged",
    "specact.types",
)  # fmt: skip

_CODE = r"(?:^(?P<ticks>`{3,}).*?^(?P=ticks)$|``.+?``|`[^`\n]*`)"
# Both look past code: a match without a path, or without a title, is some.
_LINK = re.compile(
    rf"{_CODE}|(?P<before>\]\(|(?:src|srcset|href)=\")(?P<path>[^)#\s:\"]+)(?P<section>#[^)\s\"]*)?(?=[)\s\"])",
    re.DOTALL | re.MULTILINE,
)
_HEADING = re.compile(rf"{_CODE}|^#+ (?P<title>[^\n]+)$", re.DOTALL | re.MULTILINE)
_INCLUDED = re.compile(r'^\[[^\]\n]+\]\((?P<file>[^)#\s]+)(?:#(?P<section>[^)\s]+))? "included"\)$', re.MULTILINE)
_log = get_plugin_logger("site")


class Site:
    """Which page shows which file of the repository."""

    def __init__(self, files: Files) -> None:
        self.included: dict[tuple[str, str], str] = {}  # (file, section): page
        self.shown: dict[str, str] = {}  # file: page that is made for it
        self._files = files
        for file in files:
            if file.src_uri.endswith(".md"):
                for found in _INCLUDED.finditer(file.content_string):
                    self.included[_repository(found["file"], f"docs/{file.src_uri}"), found["section"] or ""] = (
                        file.src_uri
                    )

    def page_of(self, path: str, section: str) -> str:
        """The page that a link to a file leads to; empty where there is none.

        A section that is not included by itself is one of the included file, or of the file's first section.
        """
        if path.startswith("docs/"):
            return path.removeprefix("docs/")
        for (file, part), page in self.included.items():
            if file == path and part in ("", section.removeprefix("#")):
                return page
        first = [page for (file, _), page in self.included.items() if file == path]
        return self.shown.get(path, "") if section or not first else first[0]

    def show(self, path: str) -> str | None:
        """A page's text for a file or folder outside docs/, None where there is nothing new to show."""
        here = ROOT / path
        if self.page_of(path, "") or not here.exists():
            return None
        self.shown[path] = f"source/{path.removesuffix('.md')}.md"
        if here.is_dir():
            return f"# {path}\n\n" + "".join(f"- [{file.name}]({here.name}/{file.name})\n" for file in _listed(here))
        text = here.read_text(encoding="utf-8")
        if here.suffix == ".md":
            return text
        language = {".py": "python", ".toml": "toml"}.get(here.suffix, "text")
        return f"# {path}\n\n````{language}\n{text}````\n"

    def relinked(self, text: str, file: str, page: str) -> str:
        """The text of a file of the repository as part of a page: its links lead to pages."""

        def lead(found: re.Match[str]) -> str:
            to = found["path"] and self.page_of(_repository(found["path"], file), found["section"] or "")
            if not to:
                return found[0]  # code, or a link that the strict build reports
            return found["before"] + posixpath.relpath(to, posixpath.dirname(page) or ".") + (found["section"] or "")

        return _LINK.sub(lead, text)

    def composed(self, text: str, file: str, page: str) -> str:
        """A page with what it includes."""
        parts, end = [], 0
        for found in _INCLUDED.finditer(text):
            included = _repository(found["file"], file)
            section = section_of((ROOT / included).read_text(encoding="utf-8"), found["section"], included)
            parts += [self.relinked(text[end : found.start()], file, page), self.relinked(section, included, page)]
            end = found.end()
        return "".join([*parts, self.relinked(text[end:], file, page)])


def section_of(text: str, section: str | None, file: str) -> str:
    """From a heading to the next one, whatever its level; the whole text without a section."""
    if section is None:
        return text
    starts = sections(text)
    if section not in starts:
        raise PluginError(f"{file} has no section #{section}; allowed: {', '.join(starts)}")
    start = starts[section]
    return text[start : min((end for end in starts.values() if end > start), default=len(text))].rstrip() + "\n"


def sections(text: str) -> dict[str, int]:
    """The anchors of all headings of a text, and where these begin."""
    return {slugify(found["title"], "-"): found.start() for found in _HEADING.finditer(text) if found["title"]}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    config.markdown_extensions.append(Roles())  # type: ignore[arg-type]
    config.site_dir = str(Path(config.site_dir) / __version__)
    config.copyright = f"specact {__version__}"
    return config


def on_post_build(config: MkDocsConfig) -> None:
    above = Path(config.site_dir).parent
    versions = sorted(
        (page.parent.name for page in above.glob("*.*.*/index.html")),
        key=lambda version: [int(part) for part in re.findall(r"\d+", version)],
        reverse=True,
    )
    newest = f"{versions[0]}/index.html"
    listed = [{"version": name, "title": name, "aliases": ["latest"] * (name == versions[0])} for name in versions]
    (above / "versions.json").write_text(json.dumps(listed))
    leads = f'<meta http-equiv="refresh" content="0; url={newest}"><a href="{newest}">specact {versions[0]}</a>'
    (above / "index.html").write_text(f'<!doctype html><html lang="en"><title>specact</title>{leads}</html>\n')


def on_files(files: Files, config: MkDocsConfig) -> Files:
    global _site
    _site = Site(files)
    texts = {f"docs/{file.src_uri}": file.content_string for file in files if file.src_uri.endswith(".md")}
    texts |= {file: (ROOT / file).read_text(encoding="utf-8") for file, _ in _site.included}
    while texts:
        file, text = texts.popitem()
        for path in filter(None, (found["path"] for found in _LINK.finditer(text))):
            linked = _repository(path, file)
            shown = None if linked.startswith(("docs/", "..")) else _site.show(linked)
            if shown is not None:
                texts[linked] = shown
                files.append(
                    File.generated(config, _site.shown[linked], content=f"---\nsearch:\n  exclude: true\n---\n{shown}")
                )
    for name in faces():
        files.append(File.generated(config, f"reference/{name}.md", content=face(name)))
    files.append(File.generated(config, "reference/commands.md", content=commands()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    uri = page.file.src_uri
    shown = {page: file for file, page in _site.shown.items()}
    if uri.startswith("reference/"):
        return markdown
    text = _site.composed(markdown, shown.get(uri, f"docs/{uri}"), uri)
    text = re.sub(r'^```(\w+) (?:example=\w+|not-run="[^"]+")$', r"```\1", text, flags=re.MULTILINE)
    if uri.startswith("results/"):  # an interval does not break
        text = re.sub(r"\[([-+\d.]+), ([-+\d.]+)\]", "[\\1,\N{NO-BREAK SPACE}\\2]", text)
    return re.sub(r"^<!-- .+? -->$", "", text, flags=re.MULTILINE)


def faces() -> list[str]:
    """Packages that export names, and modules that are public as a whole."""
    stubs = [path.parent.relative_to(ROOT / "src") for path in (ROOT / "src").rglob("__init__.pyi")]
    return sorted({".".join(stub.parts) for stub in stubs} | set(MODULES))


def face(name: str) -> str:
    """The reference of a package or module."""
    members: list[str] = []
    if (ROOT / "src" / name.replace(".", "/")).is_dir():
        package = importlib.import_module(name)
        members = list(getattr(package, "__all__", [])) or [
            own for own, value in vars(package).items() if getattr(value, "__module__", "").startswith(f"{name}.")
        ]
    chosen = f"      members: [{', '.join(members)}]\n" if members else ""
    return f"::: {name}\n    options:\n      heading_level: 1\n{chosen}"


def commands() -> str:
    """The reference of the command line: what --help says."""
    from specact.cli.main import VERBS

    said = ["# Commands\n\nWhat `specact VERB --help` says. Options without a default are required.\n"]
    for verb in VERBS:
        said += _command([verb])
    return "\n".join(said)


def _command(words: list[str]) -> list[str]:
    from specact.cli.main import parse

    out = io.TextIOWrapper(
        io.BytesIO(), encoding="utf-8", write_through=True
    )  # its encoding decides how frames are drawn
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        parse([*words, "--help-all"])
    # The usage, what it does, and the options without the frames around them.
    out.seek(0)
    usage, _, rest = out.read().partition("\n")
    does, _, options = rest.partition("╭")
    options = re.sub(r"^╭?─ (.+?) ─+╮$", r"\1:", options, flags=re.MULTILINE)
    options = re.sub(r"^╰─+╯\n?|^│ | *│$", "", options, flags=re.MULTILINE)
    head = f"{'#' * (len(words) + 1)} specact {' '.join(words)}"
    below = re.search(r"\{(.+?)\}$", usage) if "\nsubcommands:" in options else None
    return [
        f"{head}\n\n```text\n{usage}\n```\n\n{does.strip()}\n\n```text\n{options.strip()}\n```\n",
        *(part for word in (below[1].split(",") if below else []) for part in _command([*words, word])),
    ]


class Roles(Extension):
    """Sphinx's roles, such as ``:class:``: links where the site documents the name, code elsewhere."""

    def extendMarkdown(self, md: Markdown) -> None:  # noqa: N802
        md.inlinePatterns.register(_Role(_ROLE, md), "roles", 200)  # before code, which is what looks like it otherwise


_ROLE = r":(?:class|func|mod|meth|attr|data):`(?:(?P<text>[^`<]+) <(?P<named>[\w.]+)>|(?P<short>~?)(?P<name>[\w.]+))`"


class _Role(InlineProcessor):
    def handleMatch(self, m: re.Match[str], data: str) -> tuple[ElementTree.Element, int, int]:  # noqa: N802
        name = m["named"] or m["name"]
        reference = ElementTree.Element("autoref", {"identifier": name, "optional": ""})
        code = ElementTree.SubElement(reference, "code")
        code.text = m["text"] or (name.rpartition(".")[2] if m["short"] else name)
        return reference, m.start(0), m.end(0)


class Together(griffe.Extension):
    """Keeps names together that are documented together, ``seed, robot: ...``; else all but the first become a type."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = re.sub(
                r"^( *\w+(?:, \w+)+)(?=: )", lambda names: names[1].replace(", ", ",\N{NO-BREAK SPACE}"),
                obj.docstring.value, flags=re.MULTILINE,
            )  # fmt: skip


def _repository(path: str, file: str) -> str:
    """A link in a file, as a path from the repository's root."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(file), path))


def _listed(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))
