"""A bundle of one chunk policy, flow or regression: networks, units, and a manifest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from specact.errors import BundleError, unknown_name
from specact.families.chunks.adapters import FunctionPolicy
from specact.families.chunks.flow import FlowNetworks, FlowPolicy, FlowUnits
from specact.families.chunks.policy import ChunkSpec
from specact.families.codes.bundle import check_units, find_bundle
from specact.families.codes.network import open_session
from specact.families.head import check_head
from specact.families.words import INSTRUCTION, NetworkInputs, read_words
from specact.observation import read_spec
from specact.runtime.manifest import BundleFolder, read_manifest
from specact.units import ActionUnits

NETWORKS = {"encoder": "encoder.onnx", "prefix": "prefix.onnx", "expert": "expert.onnx", "guide": "guide.onnx"}
FLOW_PARTS = {**NETWORKS, "normalisation": "normalisation.safetensors"}
REGRESSION_PARTS = {"policy": "policy.onnx", "normalisation": "normalisation.safetensors"}


@dataclass(frozen=True)
class FlowBundle(BundleFolder):
    """A loaded bundle that holds a flow policy.

    Attributes:
        spec, networks, units: the parts.
    """

    spec: ChunkSpec
    networks: FlowNetworks
    units: FlowUnits

    def policy(self, steps: int = 10, beta: float = 5.0, spread: float = 1.0) -> FlowPolicy:
        """The policy with this number of Euler steps; the networks are shared."""
        return FlowPolicy(self.networks, self.units, self.spec, steps=steps, beta=beta, spread=spread)


def load_flow(
    name_or_path: str | Path,
    *,
    variants: Mapping[str, Path] | None = None,
    provider: str = "CPUExecutionProvider",
    threads: int = 1,
) -> FlowBundle:
    """Loads a flow bundle and refuses parts that do not fit together.

    Args:
        name_or_path: a folder, or the name of a bundle that comes with the package, such as ``pusht-flow``.
        variants: networks used instead of the bundle's own, such as a quantised ``expert``; their shapes are checked,
            their fingerprints are not.
        provider, threads: see :class:`~specact.families.codes.network.OnnxPolicy`.

    Raises:
        BundleError: if a part is missing, damaged, or does not match its fingerprint in the manifest, or if it is not a
            flow policy's bundle.
        ConfigError: if there is no bundle of that name, no such network, or no such execution provider.
    """
    path = find_bundle(name_or_path)
    manifest = read_manifest(path, "flow", FLOW_PARTS)
    check_head(path, manifest)
    files = {part: path / file for part, file in NETWORKS.items()}
    for part in variants or ():
        if part not in files:
            raise unknown_name("network of a flow policy", part, files)
    spec = read_chunk_spec(path, manifest)
    units = read_flow_units(path / FLOW_PARTS["normalisation"], spec)
    words = read_words(manifest)
    networks = FlowNetworks(files | dict(variants or {}), spec, words, provider=provider, threads=threads)
    return FlowBundle(path, manifest, spec, networks, units)


@dataclass(frozen=True)
class RegressionBundle(BundleFolder):
    """A loaded bundle of a policy by regression.

    Attributes:
        policy: its actions are clipped to the demonstrated range.
        units: of its training data.
    """

    policy: FunctionPolicy
    units: FlowUnits


def load_regression(
    name_or_path: str | Path, *, provider: str = "CPUExecutionProvider", threads: int = 1
) -> RegressionBundle:
    """Loads a bundle of a policy by regression; arguments and errors as for :func:`load_flow`."""
    path = find_bundle(name_or_path)
    manifest = read_manifest(path, "regression", REGRESSION_PARTS)
    spec = read_chunk_spec(path, manifest)
    units = read_flow_units(path / REGRESSION_PARTS["normalisation"], spec)
    file = path / REGRESSION_PARTS["policy"]
    session = open_session(file, provider, threads)
    taken = {entry.name: list(entry.shape[1:]) for entry in session.get_inputs()}
    given = [list(entry.shape[1:]) for entry in session.get_outputs()]
    inputs = NetworkInputs(spec.observation, read_words(manifest))
    wanted = inputs.shapes
    if taken != wanted or given != [[spec.chunk, spec.actions]]:
        raise BundleError(
            f"{file} takes {taken} and gives {given}, but the bundle's manifest says {wanted} and "
            f"{[[spec.chunk, spec.actions]]}: they do not match; export the bundle again"
        )

    def run(arrays: Mapping[str, Any], instruction: Sequence[str | None] = ()) -> Any:
        tokens = {} if inputs.words is None or not instruction else {INSTRUCTION: inputs.words.numbers(instruction)}
        return session.run(None, {**arrays, **tokens})[0]

    policy = FunctionPolicy(spec, run, units=ActionUnits.of_range(units.low, units.high))
    return RegressionBundle(path, manifest, policy, units)


def read_chunk_spec(path: Path, manifest: Mapping[str, Any], repair: str = "export the bundle again") -> ChunkSpec:
    """The spec in a manifest.

    Args:
        path: the folder of the manifest, for the message.
        manifest: its content, with a ``spec``.
        repair: what to do about a damaged one, for the message.

    Raises:
        BundleError: if it is invalid.
    """
    try:
        raw = dict(manifest["spec"])
        return ChunkSpec(read_spec(raw.pop("observation")), **raw)
    except (TypeError, KeyError, ValueError, BundleError) as error:
        raise BundleError(f"the manifest of {path} has no usable spec ({error}); {repair}") from None


def read_flow_units(file: Path, spec: ChunkSpec) -> FlowUnits:
    """The units in a bundle's file.

    Raises:
        BundleError: if they are invalid, or do not match the spec.
    """
    try:
        tensors = load_file(file)
    except (SafetensorError, OSError, TypeError, KeyError) as error:  # the last two for dtypes that NumPy lacks
        raise BundleError(f"{file} is damaged ({error}); copy the bundle again") from None
    names = ("centre", "scale", "low", "high")
    if any(
        name not in tensors or tensors[name].shape != (spec.actions,) or tensors[name].dtype.kind != "f"
        for name in names
    ):
        raise BundleError(
            f"{file} does not hold {', '.join(names)} of {spec.actions} actions: it does not belong to this bundle; "
            "copy the bundle again"
        )
    check_units(file, tensors, spec.actions)
    low, high = tensors["low"], tensors["high"]
    if not (np.isfinite(low) & np.isfinite(high) & (low <= high)).all():
        raise BundleError(
            f"{file} holds a range of actions from {low.tolist()} to {high.tolist()}: all of it must be finite, and "
            "low at most high; train and export the bundle again"
        )
    return FlowUnits(*(tensors[name] for name in names))
