"""Reads trained weights back from a bundle."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch
from msgspec import structs
from safetensors.torch import load_file
from torch import Tensor

from specact.errors import ConfigError
from specact.families.codes.pair import CodeParts
from specact.lab.train.recipe import PolicyRecipe
from specact.lab.train.vqbet import Shapes, VQBeT
from specact.lab.train.windows import positions
from specact.observation import ObservationSpec
from specact.records import read_record

Role = Literal["draft", "target"]


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
        words=bundle.manifest.words if observation.instruction else None,
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
            or the weights.
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
    weights = stored_weights(bundle.files[role])
    # With the full window this changes nothing, for any histories.
    cut = {name: replace(field, history=min(window, field.history)) for name, field in observation.fields.items()}
    spec = ObservationSpec(cut, observation.instruction)
    unknown = {name: (torch.zeros(field.shape), torch.ones(field.shape)) for name, field in spec.fields.items()}
    model = VQBeT(replace(shapes, observation=spec), recipe, unknown)
    weights["positions"] = weights["positions"][: len(model.positions)]
    model.load_state_dict(weights)
    return model.eval()


def stored_weights(part: Path) -> dict[str, Tensor]:
    """The weights of a part of a bundle, in float32 by their names in the module; see :class:`WeightsFile`.

    Raises:
        ConfigError: if the bundle has none.
    """
    file = part.with_suffix(".safetensors")
    if not file.exists():
        raise ConfigError(
            f"{file.parent} has no {file.name}, as bundles of earlier versions have none; run specact train again with "
            "the folder of its run"
        )
    return {name: value.float() if value.dtype == torch.float16 else value for name, value in load_file(file).items()}
