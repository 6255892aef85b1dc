"""``specact split`` splits a target into stages: a server runs the first ones, the device the rest."""

from __future__ import annotations

from pathlib import Path

import tyro

from specact.cli.output import print_json, results


def split(bundle: tyro.conf.Positional[str], /, out: Path, json: bool = False) -> None:
    """Cut a target into stages, at every tensor through which all that follows passes.

    The folder goes to both sides: specact serve --bundle FOLDER runs the first stages of each request, specact run
    --split FOLDER the others. Any cut gives the same answer as none: exactly, with --activations float32.

    Args:
        bundle: path or name of a pair of action codes, whose target is split, of a policy by regression, or of a flow
            policy, whose encoder and prefix are split.
        out: folder to create.
        json: print the stages as JSON.
    """
    from specact.lab.train.split import split_bundle

    made = split_bundle(bundle, out)
    spec = made.spec
    if json:
        activations = [list(shape) for shape in spec.activations]
        print_json({"path": str(out), "network": spec.network, "stages": spec.stages, "activations": activations})
        return
    results.print(f"{out}: {spec.stages} stages of the network {spec.network}", highlight=False)
    for cut, shape in enumerate(spec.activations, 1):
        results.print(f"cut {cut:2}: {' x '.join(map(str, shape))} numbers", highlight=False)
