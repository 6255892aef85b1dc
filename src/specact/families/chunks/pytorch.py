"""A PyTorch module as a chunk policy; needs PyTorch, which is not part of the base install."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from specact.families.chunks.adapters import FunctionPolicy, Inputs
from specact.families.chunks.policy import ChunkSpec
from specact.units import ActionUnits


def torch_policy(spec: ChunkSpec, module: torch.nn.Module, *, units: ActionUnits | None = None) -> FunctionPolicy:
    """A PyTorch module as a policy; it is put into evaluation mode and called without gradients.

    Args:
        spec: of its observations and chunks.
        module: from a dict of tensors ``[B, ...]`` to a tensor ``[B, H, A]``, on the device of its parameters. With an
            instruction in the spec it is also called with ``instruction``, a list of B texts.
        units: the range of its actions, if known.
    """
    module = module.eval()
    place = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))

    def run(inputs: Inputs, **more: Any) -> NDArray[np.float32]:
        with torch.inference_mode():
            answer = module({name: torch.from_numpy(array).to(place) for name, array in inputs.items()}, **more)
            found: NDArray[np.float32] = answer.float().cpu().numpy()
            return found

    return FunctionPolicy(spec, run, units=units)
