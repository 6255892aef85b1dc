"""The command ``specact``: one verb per file; what each needs is imported only when it runs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module

import tyro

from specact import __version__
from specact.cli.output import print_error
from specact.errors import SpecactError
from specact.extras import missing_extra
from specact.interrupts import Interrupted

# Modules of this package, each with a function of its own name.
VERBS = (
    "demo", "data", "train", "calibrate", "eval", "report", "reproduce", "tised", "export", "pair", "split", "doctor",
    "serve", "run", "proxy", "bench", "advise",
)  # fmt: skip
# Verbs that resume in their output folder.
RESUMED = ("train", "eval", "reproduce", "tised")


def load_verb(name: str) -> Callable[..., None]:
    """The function that parses the options of a verb, and runs it."""
    own = "eval_" if name == "eval" else name
    verb: Callable[..., None] = getattr(import_module(f"specact.cli.{own}"), own)
    return verb


def main() -> None:
    """Entry point: parses, runs one verb, turns our own errors and missing extras into one sentence and status 2.

    A verb that a signal ended has the exit status 128 plus the signal's number: 130 after Ctrl-C, 143 after SIGTERM.
    """
    if sys.argv[1:] == ["--version"]:
        print(f"specact {__version__}")
        return
    asked = [word for word in sys.argv[1:2] if word in VERBS]
    try:
        tyro.extras.subcommand_cli_from_dict(
            {name: load_verb(name) for name in asked or VERBS},
            prog="specact",
            description="Speculative action inference: a small policy acts, a gate decides when to query a large one. "
            "specact --version prints the version.",
        )
    except SpecactError as error:
        print_error("; ".join([str(error), *getattr(error, "__notes__", [])]))
        sys.exit(2)
    except Interrupted as error:
        print_error("; ".join([f"ended by {error}", *_resume_hint(), *getattr(error, "__notes__", [])]))
        sys.exit(error.exit_status)
    except ModuleNotFoundError as error:
        missing = missing_extra(error)
        if missing is None:
            raise
        print_error(str(missing))
        sys.exit(2)
    except KeyboardInterrupt:
        print_error("; ".join(["stopped", *_resume_hint()]))
        sys.exit(130)


def _resume_hint() -> list[str]:
    resumes = sys.argv[1:2] and sys.argv[1] in RESUMED
    return ["run the same command again to go on from here"] if resumes else []
