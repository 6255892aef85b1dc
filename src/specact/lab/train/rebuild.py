"""Rebuilds a VQ-BeT in PyTorch from an exported bundle."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np
import onnx
import torch
from msgspec import structs
from onnx import numpy_helper
from torch import Tensor

from specact.errors import ConfigError
from specact.families.codes.pair import CodeParts
from specact.lab.train.quantise import folded
from specact.lab.train.recipe import PolicyRecipe
from specact.lab.train.vqbet import Shapes, VQBeT
from specact.lab.train.windows import positions
from specact.observation import ObservationSpec
from specact.records import read_record

Role = Literal["draft", "target"]

_EXPORTED_AS = "model."


def architecture(bundle: CodeParts, role: Role) -> tuple[PolicyRecipe, Shapes]:
    """The architecture of a bundle's policy; without dropout and observation noise.

    Raises:
        ConfigError: if the manifest lacks it.
    """
    spec, manifest = bundle.spec, bundle.manifest
    try:
        made = manifest.policies[role].removesuffix("@snapshot")
        settings = read_record(manifest.recipe["policies"][made], PolicyRecipe, f"policies.{made}")
        goal_mode = manifest.recipe["goal"]
    except (KeyError, TypeError) as error:
        raise ConfigError(
            f"the manifest of {bundle.path} does not say how its {role} was made ({error} is missing); "
            "use a bundle that specact train wrote"
        ) from None
    observation = spec.draft if role == "draft" else spec.target
    shapes = Shapes(
        observation=observation, codebooks=spec.codebooks, codes=spec.codes,
        chunk=spec.chunk, actions=spec.actions, goal_mode=goal_mode,
        words=bundle.words if observation.instruction else None,
    )  # fmt: skip
    return structs.replace(settings, dropout=0.0, state_noise=0.0), shapes


def rebuild(bundle: CodeParts, role: Role, window: int) -> VQBeT:
    """A policy of a bundle with its exported weights, and a history of the newest ``window`` of T observations.

    In training every position of the window predicts from the observations up to its own. So a history of k uses the
    first k positions, and stays within the training distribution.

    Args:
        bundle: made by ``specact train``, so that its manifest has the policy's architecture.
        role: which of the pair.
        window: k, 1 to T.

    Raises:
        ConfigError: if the window is out of range, observations differ in history, or the bundle lacks the architecture
            or a weight.
    """
    recipe, shapes = architecture(bundle, role)
    observation = shapes.observation
    if not 1 <= window <= observation.history:
        raise ConfigError(f"{bundle.name!r} supports 1 to {observation.history} observations, got {window}")
    if window < observation.history and observation.history != positions(observation):
        raise ConfigError(
            f"the observations of the {role} of {bundle.name!r} differ in history; fewer can only be shown to a policy "
            "that sees as many of each"
        )
    weights = exported_weights(folded(bundle.files[role]), _EXPORTED_AS)
    # With the full window this changes nothing, for any histories.
    cut = {name: replace(field, history=min(window, field.history)) for name, field in observation.fields.items()}
    spec = ObservationSpec(cut, observation.instruction)
    unknown = {name: (torch.zeros(field.shape), torch.ones(field.shape)) for name, field in spec.fields.items()}
    model = VQBeT(replace(shapes, observation=spec), recipe, unknown)
    wanted = model.state_dict().keys()
    missing = sorted(wanted - weights.keys())
    if missing:
        # The export deduplicates equal tensors and folds constants.
        raise ConfigError(
            f"the {role} of {bundle.name!r} cannot be rebuilt: the exported network does not name {missing[0]!r}. "
            "Policies with a camera cannot be, nor those that were hardly trained"
        )
    weights["positions"] = weights["positions"][: len(model.positions)]
    # Other tensors are constants that the module computes itself, or transposed copies.
    model.load_state_dict({name: weights[name] for name in wanted})
    return model.eval()


def exported_weights(model: onnx.ModelProto, within: str = "") -> dict[str, Tensor]:
    """The parameters and buffers of an exported module, below the name ``within``, by their original names.

    The export names everything but the weights of linear layers; those are identified by the bias that is added next.
    """
    values = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    named = {name.removeprefix(within): value for name, value in values.items() if name.startswith(within)}
    made_by = {name: node for node in model.graph.node for name in node.output}
    for node in model.graph.node:
        bias = next((name for name in node.input if node.op_type == "Add" and name.endswith(".bias")), None)
        if bias is None:
            continue
        product = next(made_by[name] for name in node.input if name != bias)
        layer = bias.removeprefix(within).removesuffix(".bias")
        named[f"{layer}.weight"] = np.ascontiguousarray(values[product.input[1]].T)
    return {name: torch.from_numpy(value.copy()) for name, value in named.items()}
