"""gym-pusht as LeRobot shows and drives it, in the terms of the bundles for PushT."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specact.errors import ObservationError
from specact.lab.envs.pusht import ACTION_SCALE_PX, ARENA_PX, observe

# The block's corners in its own frame, in gym-pusht's order [px]: of the bar, then of the stem.
CORNERS_PX = np.array(
    [[-60.0, 0.0], [60.0, 0.0], [60.0, 30.0], [-60.0, 30.0], [-15.0, 30.0], [15.0, 30.0], [15.0, 120.0], [-15.0, 120.0]]
)


class PushT:
    """gym-pusht shows the block's corners and takes targets; the bundles see poses and give displacements.

    It needs ``--env.obs_type=environment_state_agent_pos``.
    """

    def observe(self, seen: Mapping[str, Any]) -> dict[str, Any]:
        """The observation of the bundles: the block's pose is the one that fits its corners best."""
        if "environment_state" not in seen:
            raise ObservationError(
                "there is no observation.environment_state; --policy.terms=pusht needs "
                "--env.obs_type=environment_state_agent_pos",
                "missing",
            )
        corners = np.asarray(seen["environment_state"], np.float64).reshape(-1, 2)
        middle, own_middle = corners.mean(axis=0), CORNERS_PX.mean(axis=0)
        away, own = corners - middle, CORNERS_PX - own_middle
        # The turn that brings the one closest to the other.
        angle = math.atan2((own[:, 0] * away[:, 1] - own[:, 1] * away[:, 0]).sum(), (own * away).sum())
        turn = np.array([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
        return {"state": observe([*seen["state"], *(middle - turn @ own_middle), angle])}

    def act(self, action: NDArray[np.float32], seen: Mapping[str, Any]) -> NDArray[np.float32]:
        """The agent's target [px], from where it is now."""
        target = seen["state"] + ACTION_SCALE_PX * np.clip(action, -1.0, 1.0)
        return np.asarray(np.clip(target, 0.0, ARENA_PX), np.float32)
