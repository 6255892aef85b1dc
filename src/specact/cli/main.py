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
    "doctor": doctor.doctor,
    "serve": serve.serve,
    "run": run.run,
    "proxy": proxy.proxy,
    "bench": bench.bench,
}


def main() -> None:
    """Entry point: parses, runs one verb, turns our own errors and missing extras into one sentence and status 2."""
    try:
        tyro.extras.subcommand_cli_from_dict(
            VERBS,  # type: ignore[arg-type]
            prog="specact",
            description="Speculative action inference: a small policy acts, a gate decides when to query a large one.",
        )
    except SpecactError as error:
        say_error(str(error))
        sys.exit(2)
    except ModuleNotFoundError as error:
        missing = missing_extra(error)
        if missing is None:
            raise
        say_error(str(missing))
        sys.exit(2)
    except KeyboardInterrupt:
        say_error("stopped; run the same command again to go on from here")
        sys.exit(130)
