"""Your own policy as the target, with a small draft in front of it, and a gate that needs no calibration.

Needs: pip install specact. Takes a few seconds. The target here is a plain function; a PyTorch module is one as well:
specact.families.chunks.torch_policy(module, ...).
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

import specact
from specact.families.chunks import ChunkParts, PairSpec
from specact.gates import ActionDeviation, Always, Controller, Gate, Never, RateBudget

CHUNK, RATE_HZ, EPISODES, STEPS = 8, 20.0, 40, 80
SEES = {"state": (6,)}  # position, velocity and goal of a cart on a table, each [2]
LOW, HIGH = [-1.0, -1.0], [1.0, 1.0]  # range of the actions, which are accelerations
Inputs = Mapping[str, NDArray[Any]]


def move(position: Any, velocity: Any, action: Any) -> tuple[Any, Any]:
    """The cart: position and velocity one control step later."""
    velocity = 0.9 * velocity + 0.1 * np.clip(action, -1.0, 1.0)
    return position + 0.2 * velocity, velocity


@specact.chunk_policy(observation=SEES, chunk=CHUNK, actions=2, rate_hz=RATE_HZ, low=LOW, high=HIGH)
def target(inputs: Inputs) -> NDArray[np.float64]:
    """Yours: [B, 1, 6] to [B, 8, 2]. Here a controller that thinks its whole chunk ahead."""
    position, velocity, goal = np.split(inputs["state"][:, -1], 3, axis=-1)
    actions = []
    for _ in range(CHUNK):
        actions.append(np.clip(4.0 * (goal - position) - 3.0 * velocity, -1.0, 1.0))
        position, velocity = move(position, velocity, actions[-1])
    return np.stack(actions, axis=1)


@specact.chunk_policy(observation=SEES, chunk=CHUNK, actions=2, rate_hz=RATE_HZ, low=LOW, high=HIGH)
def draft(inputs: Inputs) -> NDArray[np.float64]:
    """The small one on the device: full thrust towards the goal. It is right until it has to brake."""
    position, _, goal = np.split(inputs["state"][:, -1], 3, axis=-1)
    return np.repeat(np.clip(4.0 * (goal - position), -1.0, 1.0)[:, None], CHUNK, axis=1)


assert draft.units is not None
# Drafted actions are kept up to the first that is further than this from the target's.
spec = PairSpec(target.spec, execute=2, accept_within=0.2)
pair = ChunkParts("cart", draft, draft.units, spec, lambda: target).pair()


def drive(gate: Gate) -> tuple[float, float, float]:
    """Transmission rate, accepted share of the verified actions, and distance from the goal at the end."""
    policy, distances = specact.SpeculativePolicy(pair, gate), []
    rng = np.random.default_rng(0)
    for episode in range(EPISODES):
        policy.reset(episode)
        (position, goal), velocity = rng.uniform(-0.8, 0.8, (2, 2)), np.zeros(2)
        for _ in range(STEPS):
            action = policy.act({"state": np.concatenate([position, velocity, goal])})
            position, velocity = move(position, velocity, action)
        distances.append(np.linalg.norm(position - goal))
    counts = policy.counts
    return counts["transmitted"] / counts["steps"], counts["accepted"] / max(1, counts["verified"]), np.mean(distances)


gates: dict[str, Gate] = {
    "never: the draft alone": Never(),
    "deviation, rate held at .3": Controller(ActionDeviation(0.0), RateBudget(0.3)),
    "deviation, rate held at .6": Controller(ActionDeviation(0.0), RateBudget(0.6)),
    "always: every step verified": Always(),
}
print(f"{'gate':28s}  sent  accepted  distance at the end   ({EPISODES} episodes)")
for name, gate in gates.items():
    sent, accepted, distance = drive(gate)
    print(f"{name:28s}  {sent:.2f}  {accepted:8.2f}  {distance:.3f}")
print(
    "\nThis is lossy: drafted actions are accepted by their distance."
    "\nNext: docs/how-to/policy.md and draft.md, which have the same with files and a server"
)
