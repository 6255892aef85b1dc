"""``specact list`` says which names there are; ``specact completion`` has a shell complete verbs and options."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import reduce
from importlib import import_module
from operator import or_
from pathlib import Path
from pkgutil import iter_modules
from typing import Annotated, Any, Literal

import tyro
from tyro.conf import Positional

from specact import families
from specact.bundle.bundle import named_bundles
from specact.bundle.manifest import KINDS, MANIFEST, read_manifest
from specact.cli.options import MARKERS, Options
from specact.cli.output import print_result, rows_of, text_of
from specact.errors import SpecactError
from specact.gates.settings import DEFAULTS, GATES, load_gate
from specact.lab.envs import SUITES, TASKS, about
from specact.lab.rollout.methods import METHODS
from specact.links.link import LINKS
from specact.load import COMPOSITIONS

Kind = Literal["bundles", "methods", "decodings", "gates", "environments", "links", "families", "recipes"]


@dataclass(frozen=True)
class List(Options):
    """List the names that commands take, each with a line that says what it is."""

    # which of them; all if not given
    kinds: Positional[Annotated[tuple[Kind, ...], tyro.conf.arg(help_behavior_hint="")]] = ()
    json: bool = False  # print names and lines as JSON

    def run(self) -> None:
        lists = {kind: _LISTS[kind]() for kind in self.kinds or _LISTS}
        widths = {kind: max(map(len, names), default=0) for kind, names in lists.items()}
        lines = [line for kind, names in lists.items() for line in ("", kind, *rows_of(names, widths[kind]))]
        print_result(self.json, lists, lines[1:])


@dataclass(frozen=True)
class Completion(Options):
    """Print a script with which a shell completes verbs and options: source <(specact completion bash)."""

    shell: Positional[Literal["bash", "zsh"]]

    def run(self) -> None:
        from specact.cli.main import VERBS, load_verb

        every: Any = reduce(or_, (Annotated[load_verb(name), tyro.conf.subcommand(name)] for name in VERBS))
        with suppress(SystemExit):
            tyro.cli(every, prog="specact", args=["--tyro-print-completion", self.shell], config=MARKERS)


def first_sentence(text: str | None) -> str:
    """The first sentence of a docstring or comment, without its marks."""
    plain = re.sub(r":\w+:`~?([^`]+)`|``", r"\1", " ".join((text or "").partition("\n\n")[0].split()))
    return re.split(r"(?<=\.)\s(?=[A-Z])", plain)[0].removesuffix(".")


def _bundles() -> dict[str, str]:
    """Those that have a name, and those of the working folder, by path."""
    manifests = sorted([*Path().glob(f"*/{MANIFEST}"), *Path().glob(f"runs/*/bundles/*/{MANIFEST}")])
    bundles = dict[str, str]()
    for name, path in (named_bundles() | {str(path.parent): path.parent for path in manifests}).items():
        try:
            manifest = read_manifest(path)
        except SpecactError:  # the manifest of a run
            continue
        gates = sorted({file.stem.rpartition("-")[0] for file in path.glob("calibration/*.json")})
        calibrated = f"; calibrated: {text_of(gates)}" if gates else ""
        bundles[name] = f"{KINDS[manifest.kind]}, environment {manifest.env or 'none'}{calibrated}"
    return bundles


def _gates() -> dict[str, str]:
    usual = {name: f" ({text_of(values)})" for name, values in DEFAULTS.items()}
    return {name: first_sentence(inspect.getdoc(load_gate(name))) + usual.get(name, "") for name in GATES}


def _recipes() -> dict[str, str]:
    """Those of the working folder, or of a checkout."""
    folder = Path("recipes") if Path("recipes").is_dir() else Path(__file__).parents[3] / "recipes"
    comments = {path: re.match(r"(#[^\n]*\n)*", path.read_text()) for path in sorted(folder.glob("*.toml"))}
    return {str(path): first_sentence(text[0].replace("#", "")) for path, text in comments.items() if text}


_LINK = "round trip {0.rtt_ms:g} ± {0.jitter_ms:g} ms, {0.up_mbit_s:.0f} Mbit/s up, {0.down_mbit_s:.0f} down"
# Methods are those of specact eval --methods, which also takes the decodings, those of --decoding, and gates.
_LISTS: dict[Kind, Callable[[], dict[str, str]]] = {
    "bundles": _bundles,
    "methods": lambda: {name: method.about for name, method in METHODS.items() if method.composition is None},
    "decodings": lambda: {name: composition.about for name, composition in COMPOSITIONS.items()},
    "gates": _gates,
    "environments": lambda: {
        name: first_sentence(about(where))
        for name, where in [*TASKS.items(), *((f"{package}-SUITE", where) for package, (where, _) in SUITES.items())]
    },
    "links": lambda: {name: _LINK.format(link) for name, link in LINKS.items()},
    "families": lambda: {
        family.name: first_sentence(import_module(f"specact.families.{family.name}").__doc__)
        for family in iter_modules(families.__path__)
    },
    "recipes": _recipes,
}
