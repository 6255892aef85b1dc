"""``specact split`` cuts a target into stages: a server runs the first ones, the device the rest."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional

from specact.cli.options import Options
from specact.cli.output import print_result


@dataclass(frozen=True)
class Split(Options):
    """Cut a target into stages, at every tensor through which all that follows passes.

    The folder goes to both sides: specact serve FOLDER runs the first stages of each request, specact run --split
    FOLDER the others. With float32 activations any cut gives the answer of none, exactly.
    """

    # pair of action codes or policy by regression, whose target is cut, or flow policy, whose prefix is
    bundle: Positional[str]
    out: Path  # folder to create
    json: bool = False  # print the stages as JSON

    def run(self) -> None:
        from specact.lab.train.split import split_bundle

        spec = split_bundle(self.bundle, self.out).spec
        activations = [list(shape) for shape in spec.activations]
        found = {"path": str(self.out), "network": spec.network, "stages": spec.stages, "activations": activations}
        cuts = [f"cut {cut:2}: {' x '.join(map(str, shape))} numbers" for cut, shape in enumerate(activations, 1)]
        print_result(self.json, found, [f"{self.out}: {spec.stages} stages of the network {spec.network}", *cuts])
