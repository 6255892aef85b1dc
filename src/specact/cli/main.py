"""The command ``specact``: one verb per file; what each needs is imported only when it runs."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from difflib import get_close_matches
from functools import partial
from importlib import import_module
from typing import Any, NoReturn

import tyro

from specact import __version__
from specact.cli.options import MARKERS, names_of, with_file
from specact.cli.output import print_error, rows_of, say
from specact.errors import ConfigError, SpecactError, unknown_name
from specact.imports import missing_extra
from specact.interrupts import Interrupted

# Verb: what it does. The verb NAME is the class or union `NAME.title()` of the module NAME, or of that in _MODULES.
VERBS = {
    "demo": "compare draft, target, hybrid, random and ADAHI on simulated episodes",
    "run": "drive a robot with a pair: the draft acts, a gate decides when the server's target is asked",
    "play": "drive a robot with one policy alone, while it infers the next chunk",
    "serve": "serve a target to robots",
    "capacity": "say how many robots a server on this machine holds",
    "doctor": "report extras, inference times, and the latency of a server",
    "proxy": "relay a connection like a slow link",
    "netem": "shape a network device like a slow link",
    "data": "describe or generate demonstrations, or make them of recordings",
    "train": "train the policies of a recipe",
    "distil": "train a pair's draft on its target's answers",
    "pair": "make a pair of two chunk policies",
    "export": "copy a bundle to where it will be used",
    "bundle": "check bundles of unknown origin",
    "split": "cut a target into stages, for server and device",
    "calibrate": "find a gate's threshold for a rate",
    "eval": "run methods side by side on the same episodes",
    "offline": "calibrate and compare along demonstrations, without a simulator",
    "report": "make one page of evaluations and recordings",
    "tised": "ask what a faster step does to the task",
    "advise": "recommend what to run on a device",
    "list": "list bundles, methods, gates, environments, links, recipes",
    "completion": "have your shell complete verbs and options",
}
_MODULES = {
    "demo": "eval", "proxy": "links", "netem": "links", "distil": "train", "pair": "bundles", "split": "bundles",
    "bundle": "bundles", "export": "bundles", "advise": "report", "offline": "calibrate",
    "list": "listing", "completion": "listing",
}  # fmt: skip
# Verbs that resume in their output folder.
RESUMED = ("train", "distil", "eval", "tised")
# What earlier versions had: a verb, an option of a verb, or of any verb; and what to type now.
OLD = {
    "bench": "specact eval PAIR --realtime --link LINK; of a server python benchmarks/server.py, in a checkout",
    "reproduce": "python -m experiments, in a checkout of the repository",
    "run --policy": "specact play SOURCE",
    **dict.fromkeys(("run --overlap", "run --no-overlap", "eval --overlap"), "it without: a request waits for a draft"),
    "run --hold --": "--hold RATE, as in --hold 0.4",
    "run --latency-budget-ms": "--hold TIMEms, as in --hold 30ms",
    "run --link-share-kbit": "--hold SHAREkbit, as in --hold 100kbit",
    "run --cut": "--split FOLDER@CUT",
    **{f"--{name}": f"--gate-options {name}=VALUE" for name in ("reading", "alpha", "source")},
    "--uncertainty": "--gate-options kind=NAME",
    "--max-skips": "--gate-options max_skips=N",
    "--learned-max-skips": "--gate-options learned.max_skips=N",
    **dict.fromkeys(("serve --max-wait-ms", "serve --inline-below-ms", "serve --log-steps"), "it without"),
    **dict.fromkeys(("serve --max-queue", "serve --max-pending"), "it without"),
    "eval --offset": "it without: a verified step takes the target's offset",
    **{f"{verb} --offline": f"specact offline {verb}" for verb in ("calibrate", "eval")},
    "eval --wire": "it without: only the stream is left",
    "train --distil": "specact distil PAIR; with a recipe, --teacher SOURCE",
    "data generate": "specact data record",
    "tised explain": "specact tised analyse SWEEP --lever NAME",
    "advise --study": "it without: what other policies of the task need is in the package",
    "export --bundle": "specact export RUN/bundles/NAME",
    **dict.fromkeys(("eval --mse", "eval --data", "eval --demonstrations"), "specact offline eval, for errors"),
    "proxy --netem": "specact netem DEVICE",
    "play --execution naive": "--execution append",
    "play --execution inpainting": "--execution rtc",
}
# Options of earlier versions, still read, for what is now a verb's first word.
_NAMED = dict.fromkeys(("demo", "run", "doctor", "calibrate", "eval", "advise"), "--bundle")
_NAMED |= {"serve": "--bundle|--policy"}


def load_verb(name: str) -> Any:
    """The options of a verb: a class, or a union of classes, each with a method ``run``; ConfigError if unknown."""
    if name in OLD:
        raise ConfigError(f"specact no longer has {name}; type {OLD[name]}")
    if name not in VERBS:
        raise unknown_name("command", name, VERBS)
    return getattr(import_module(f"specact.cli.{_MODULES.get(name, name)}"), name.title())


def parse(words: Sequence[str]) -> Any:
    """Reads a command, the verb and its options, and runs nothing; exits after printing help.

    ConfigError for a verb or option that is unknown, or of earlier versions, or a value that is not allowed.
    """
    verb, *given = words
    options = load_verb(verb)
    for old, now in OLD.items():
        owner, _, option = old.rpartition(" ") if old.startswith("--") else old.partition(" ")
        typed = re.escape(option).replace(r"\ ", "[ =]")
        if owner in ("", verb) and re.search(f" {typed}([ =]|$|(?<=--))", f" {' '.join(given)}"):
            raise ConfigError(f"specact {verb} {option.removesuffix(' --')} is no longer typed so; type {now}")
    if verb in _NAMED:
        given = [part for word in given for part in re.split("(?<=^--bundle)=|(?<=^--policy)=", word)]
        at = next((at for at, word in enumerate(given) if re.fullmatch(_NAMED[verb], word)), len(given))
        given = [*given[at + 1 : at + 2], *given[:at], *given[at + 2 :]]
    given = with_file(verb, given, load_verb)
    given = ["--help" if word == "--help-all" else word for word in given]
    # Not a stable interface: where it is gone, the parser prints what it has to say.
    refusing = getattr(getattr(tyro, "_errors", None), "on_parse_error", nullcontext)
    with refusing(partial(_refuse, verb, options, given)):
        return tyro.cli(options, prog=f"specact {verb}", args=given, config=MARKERS)


def _refuse(verb: str, options: Any, given: Sequence[str], event: Any) -> None:
    """Raises what the parser found wrong as one sentence; it prints events that are of another form than these."""
    said = ""
    with suppress(AttributeError):
        match event:
            case object(unrecognized_tokens=[str(word), *_]) | object(tokens=[str(word), *_]):
                known = [name for name in names_of(options) if name.startswith("--") == word.startswith("--")]
                near = get_close_matches(word.partition("=")[0], known, 1) or (known if len(known) < 5 else ())
                said = "; perhaps ".join([f"unknown {'option' if word.startswith('--') else 'word'} {word!r}", *near])
            case object(missing_arguments=[*missing]):
                said = f"specact {verb} needs {', '.join(argument.arg.display_name() for argument in missing)}"
            case object(subcommand_spec=object(parser_from_name=names)):
                said = f"specact {verb} needs one of {', '.join(names)}"
            case object(argument=argument, value=str(value), choices=choices):
                raise unknown_name(argument.display_name(), value, choices)
            case object(argument=argument):
                name, takes = argument.display_name(), argument.lowered
                typed = re.search(f"{name}[ =]?((?:(?! --).)*)", " ".join(given))
                every = ", all words up to the next option" if takes.nargs == "*" else ""
                kinds = " or ".join(dict.fromkeys(re.findall(r"[\w-]+", takes.metavar)))
                said = f"{name} takes {kinds}{every}; got {typed[1] if typed else ''!r}"
                if any(word.partition("=")[0] == f"--{name}" for word in given):
                    said = f"{name} is typed by itself; leave out --{name}"
    if said:
        raise ConfigError(f"{said}; see specact {verb} --help")


def main() -> None:
    """Entry point: parses, runs one verb, turns our own errors and missing extras into one sentence and status 2.

    A verb that a signal ended has the exit status 128 plus the signal's number: 130 after Ctrl-C, 143 after SIGTERM.
    """
    words = sys.argv[1:]
    try:
        if words == ["--version"]:
            print(f"specact {__version__}")
        elif not words or words[0] in ("-h", "--help", "--help-all"):
            say("usage: specact VERB [OPTIONS]; specact VERB --help, specact VERB --help-all, specact --version\n")
            for line in rows_of(VERBS):
                say(f"  {line}")
        else:
            parse(words).run()
        sys.stdout.flush()
    except SpecactError as error:
        _fail(str(error), error, 2)
    except Interrupted as error:
        _fail(f"ended by {error}", error, error.exit_status)
    except ModuleNotFoundError as error:
        missing = missing_extra(error)
        if missing is None:
            raise
        _fail(str(missing), missing, 2)
    except BrokenPipeError:  # as with | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except KeyboardInterrupt as error:
        _fail("stopped", error, 130)


def _fail(message: str, error: BaseException, status: int) -> NoReturn:
    sentences = [message]
    if isinstance(error, KeyboardInterrupt) and sys.argv[1:2] and sys.argv[1] in RESUMED:
        sentences.append("run the same command again to go on from here")
    print_error("; ".join([*sentences, *getattr(error, "__notes__", [])]))
    sys.exit(status)
