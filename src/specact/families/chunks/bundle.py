"""A bundle of one chunk policy, flow or regression: networks, units, and a manifest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from specact.bundle.bundle import Bundle, check_scale, open_bundle
from specact.bundle.network import CPU, Compute, Network
from specact.bundle.words import INSTRUCTION, NetworkInputs
from specact.errors import BundleError, unknown_name
from specact.families.chunks.adapters import FunctionPolicy
from specact.families.chunks.flow import FlowNetworks, FlowPolicy, FlowUnits
from specact.families.chunks.policy import ChunkSpec
from specact.units import ActionUnits

NETWORKS = {"encoder": "encoder.onnx", "prefix": "prefix.onnx", "expert": "expert.onnx", "guide": "guide.onnx"}
FLOW_PARTS = {**NETWORKS, "normalisation": "normalisation.safetensors"}
REGRESSION_PARTS = {"policy": "policy.onnx", "normalisation": "normalisation.safetensors"}


@dataclass(frozen=True)
class FlowBundle(Bundle[ChunkSpec]):
    """A loaded bundle that holds a flow policy.

    Attributes:
        networks, units: the parts.
    """

    networks: FlowNetworks
    units: FlowUnits

    def policy(self, steps: int = 10, beta: float = 5.0, spread: float = 1.0) -> FlowPolicy:
        """The policy with this number of Euler steps; the networks are shared."""
        return FlowPolicy(self.networks, self.units, self.spec, steps=steps, beta=beta, spread=spread)


def load_flow(
    name_or_path: str | Path, *, variants: Mapping[str, Path] | None = None, compute: Compute = CPU
) -> FlowBundle:
    """Loads a flow bundle and refuses parts that do not fit together.

    Args:
        name_or_path: a folder, or the name of a bundle that comes with the package, such as ``pusht-flow``.
        variants: networks used instead of the bundle's own, such as a quantised ``expert``; their shapes are checked,
            their fingerprints are not.
        compute: where its networks run.

    Raises:
        BundleError: if a part is missing, damaged, or does not match its fingerprint in the manifest, or if it is not a
            flow policy's bundle.
        ConfigError: if there is no bundle of that name, or no such network.
    """
    bundle = open_bundle(name_or_path, "flow", ChunkSpec, FLOW_PARTS)
    for part in variants or ():
        if part not in NETWORKS:
            raise unknown_name("network of a flow policy", part, NETWORKS)
    networks = FlowNetworks(
        {**bundle.files, **(variants or {})}, bundle.spec, bundle.manifest.words, compute=compute
    )  # fmt: skip
    return FlowBundle(bundle.path, bundle.manifest, bundle.spec, bundle.files, networks, read_flow_units(bundle))


@dataclass(frozen=True)
class RegressionBundle(Bundle[ChunkSpec]):
    """A loaded bundle of a policy by regression.

    Attributes:
        policy: its actions are clipped to the demonstrated range.
        units: of its training data.
    """

    policy: FunctionPolicy
    units: FlowUnits


def load_regression(name_or_path: str | Path, *, compute: Compute = CPU) -> RegressionBundle:
    """Loads a bundle of a policy by regression; arguments and errors as for :func:`load_flow`."""
    bundle = open_bundle(name_or_path, "regression", ChunkSpec, REGRESSION_PARTS)
    spec, units = bundle.spec, read_flow_units(bundle)
    inputs = NetworkInputs(spec.observation, bundle.manifest.words)
    network = Network(bundle.files["policy"], inputs.shapes, {"actions": ("batch", spec.chunk, spec.actions)}, compute)

    def run(arrays: Mapping[str, Any], instruction: Sequence[str | None] = ()) -> Any:
        tokens = {} if inputs.words is None or not instruction else {INSTRUCTION: inputs.words.numbers(instruction)}
        return network.run({**arrays, **tokens})[0]

    policy = FunctionPolicy(spec, run, units=ActionUnits.of_range(units.low, units.high))
    return RegressionBundle(bundle.path, bundle.manifest, spec, bundle.files, policy, units)


def read_flow_units(bundle: Bundle[ChunkSpec]) -> FlowUnits:
    """The units in a bundle's normalisation.

    Raises:
        BundleError: if they are invalid, or do not match the spec.
    """
    names = ("centre", "scale", "low", "high")
    tensors = bundle.tensors("normalisation", dict.fromkeys(names, (np.float32, (bundle.spec.actions,))))
    units, file = FlowUnits(*(tensors[name] for name in names)), bundle.files["normalisation"]
    check_scale(file, units.centre, units.scale)
    if not (units.low <= units.high).all():
        raise BundleError(
            f"{file} holds a range of actions from {units.low.tolist()} to {units.high.tolist()}; low must be at most "
            "high; train and export the bundle again"
        )
    return units
