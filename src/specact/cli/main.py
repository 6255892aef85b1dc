"""The command ``specact``: one verb per file; what each needs is imported only when it runs."""

from __future__ import annotations

import sys

import tyro

from specact.cli import (
    bench,
    calibrate,
    data,
    demo,
    doctor,
    eval_,
    export,
    pair,
    proxy,
    report,
    reproduce,
    run,
    serve,
    tised,
    train,
)
from specact.cli.output import say_error
from specact.errors import SpecactError
from specact.extras import missing_extra
from specact.interrupts import Interrupted

VERBS = {
    "demo": demo.demo,
    "data": data.data,
    "train": train.train,
    "calibrate": calibrate.calibrate,
    "eval": eval_.eval_,
    "report": report.report,
    "reproduce": reproduce.reproduce,
    "tised": tised.tised,
    "export": export.export,
    "pair": pair.pair,
    "doctor": doctor.doctor,
    "serve": serve.serve,
    "run": run.run,
    "proxy": proxy.proxy,
    "bench": bench.bench,
}
# What writes into a folder as it goes.
RESUMED = ("train", "eval", "reproduce", "tised")


def main() -> None:
    """Entry point: parses, runs one verb, turns our own errors and missing extras into one sentence and status 2.

    A verb that a signal ended has the exit status 128 and the signal's number: 130 after Ctrl-C, 143 after SIGTERM.
    """
    try:
        tyro.extras.subcommand_cli_from_dict(
            VERBS,  # type: ignore[arg-type]
            prog="specact",
            description="Speculative action inference: a small policy acts, a gate decides when to query a large one.",
        )
    except SpecactError as error:
        say_error("; ".join([str(error), *getattr(error, "__notes__", [])]))
        sys.exit(2)
    except Interrupted as error:
        say_error("; ".join([f"ended by {error}", *_how_to_go_on(), *getattr(error, "__notes__", [])]))
        sys.exit(error.exit_status)
    except ModuleNotFoundError as error:
        missing = missing_extra(error)
        if missing is None:
            raise
        say_error(str(missing))
        sys.exit(2)
    except KeyboardInterrupt:
        say_error("; ".join(["stopped", *_how_to_go_on()]))
        sys.exit(130)


def _how_to_go_on() -> list[str]:
    goes_on = sys.argv[1:2] and sys.argv[1] in RESUMED
    return ["run the same command again to go on from here"] if goes_on else []
