"""``specact list`` says which names there are; ``specact completion`` has a shell complete verbs and options."""

from __future__ import annotations

import ast
import inspect
import re
from dataclasses import dataclass
from functools import reduce
from importlib import import_module
from importlib.util import find_spec
from operator import or_
from pathlib import Path
from pkgutil import iter_modules
from typing import Annotated, Any, Literal, get_args

import tyro
from tyro.conf import Positional

from specact import families
from specact.cli.options import MARKERS, Options
from specact.cli.output import print_result, rows_of, text_of
from specact.errors import SpecactError

Kind = Literal["bundles", "methods", "decodings", "gates", "environments", "links", "families", "recipes"]


@dataclass(frozen=True)
class List(Options):
    """List the names that commands take, each with a line that says what it is."""

    # which of them; all if not given
    kinds: Positional[Annotated[tuple[Kind, ...], tyro.conf.arg(help_behavior_hint="")]] = ()
    json: bool = False  # print names and lines as JSON

    def run(self) -> None:
        lists = dict(zip(get_args(Kind), _LISTS, strict=True))
        found = {kind: lists[kind]() for kind in self.kinds or lists}
        lines = [
            line
            for kind, names in found.items()
            for line in ("", kind, *rows_of(names, max(map(len, names), default=0)))
        ]
        print_result(self.json, found, lines[1:])


@dataclass(frozen=True)
class Completion(Options):
    """Print a script with which a shell completes verbs and options: source <(specact completion bash)."""

    shell: Positional[Literal["bash", "zsh"]]

    def run(self) -> None:
        from specact.cli.main import VERBS, load_verb

        every: Any = reduce(or_, (Annotated[load_verb(name), tyro.conf.subcommand(name)] for name in VERBS))
        tyro.cli(every, prog="specact", args=["--tyro-print-completion", self.shell], config=MARKERS)


def first_sentence(text: str | None) -> str:
    """The first sentence of a docstring or comment, without its marks."""
    plain = re.sub(r":\w+:`~?([^`]+)`|``", r"\1", " ".join((text or "").partition("\n\n")[0].split()))
    return re.split(r"(?<=\.)\s(?=[A-Z])", plain)[0].removesuffix(".")


def _bundles() -> dict[str, str]:
    """Those that have a name, and those of the working folder, by path."""
    from specact.bundle.bundle import named_bundles
    from specact.bundle.manifest import KINDS, MANIFEST, read_manifest

    here, found = [*Path().glob(f"*/{MANIFEST}"), *Path().glob(f"runs/*/bundles/*/{MANIFEST}")], dict[str, str]()
    for name, path in (named_bundles() | {str(path.parent): path.parent for path in sorted(here)}).items():
        try:
            manifest = read_manifest(path)
        except SpecactError:  # the manifest of a run
            continue
        gates = sorted({file.stem.rpartition("-")[0] for file in path.glob("calibration/*.json")})
        calibrated = f"; calibrated: {text_of(gates)}" if gates else ""
        found[name] = f"{KINDS[manifest.kind]}, environment {manifest.env or 'none'}{calibrated}"
    return found


def _methods() -> dict[str, str]:
    """Those of specact eval --methods, which also takes every decoding, gate and random_METHOD."""
    from specact.lab.rollout.methods import METHODS

    return {name: method.about for name, method in METHODS.items() if method.composition is None}


def _decodings() -> dict[str, str]:
    """Those of --decoding, for token policies and flow policies."""
    from specact.load import COMPOSITIONS

    return {name: composition.about for name, composition in COMPOSITIONS.items()}


def _gates() -> dict[str, str]:
    from specact.gates.settings import DEFAULTS, GATES, load_gate

    usual = {name: f" ({text_of(values)})" for name, values in DEFAULTS.items()}
    return {name: first_sentence(inspect.getdoc(load_gate(name))) + usual.get(name, "") for name in GATES}


def _environments() -> dict[str, str]:
    from specact.lab.envs import TASKS

    return {name: _about(place) for name, place in TASKS.items()}


def _about(place: str) -> str:
    """What stands below the object MODULE:NAME in the source, else the module's docstring; nothing is imported."""
    module, _, name = place.partition(":")
    spec = find_spec(module)
    tree = ast.parse(Path(spec.origin or "").read_text() if spec else "")
    for node, below in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name and isinstance(below, ast.Expr):
            return first_sentence(ast.literal_eval(below.value))
    return first_sentence(ast.get_docstring(tree))


def _links() -> dict[str, str]:
    from specact.links.link import LINKS

    return {
        name: f"round trip {each.rtt_ms:g} ± {each.jitter_ms:g} ms, {each.up_mbit_s:.0f} Mbit/s up, "
        f"{each.down_mbit_s:.0f} down"
        for name, each in LINKS.items()
    }


def _families() -> dict[str, str]:
    modules = (module.name for module in iter_modules(families.__path__))
    return {name: first_sentence(import_module(f"{families.__name__}.{name}").__doc__) for name in modules}


def _recipes() -> dict[str, str]:
    """Those of the working folder, and of a checkout."""
    folder = Path("recipes") if Path("recipes").is_dir() else Path(__file__).parents[3] / "recipes"
    comments = {path: re.match(r"(#[^\n]*\n)*", path.read_text()) for path in sorted(folder.glob("*.toml"))}
    return {str(path): first_sentence(text[0].replace("#", "")) for path, text in comments.items() if text}


_LISTS = (_bundles, _methods, _decodings, _gates, _environments, _links, _families, _recipes)
