"""An unmodified client of openpi's asks our server; then a draft and a gate stand in front of such a server.

Needs: pip install 'specact[server,sim]', and for the first half pip install --no-deps openpi-client. Takes a few
seconds. Our own server takes the place of openpi's here: it speaks the same protocol.
"""

import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

import specact
from specact.families.chunks import ChunkParts, PairSpec, target_endpoint
from specact.gates import ActionDeviation, Always, Controller, Gate, Never, RateBudget
from specact.lab.envs import load_task
from specact.lab.envs.robot import SimulatedRobot
from specact.remote import Client, remote_verifier
from specact.types import Origin

EPISODES = 10

words = [sys.executable, "-m", "specact", "serve", "ball-chase-flow", "--port", "0"]
server = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
assert server.stderr is not None
url = next(word.rstrip(";") for line in server.stderr for word in line.split() if word.startswith("ws://"))


def ask_as_openpi_does() -> None:
    """As a robot of openpi's would; nothing of specact is in it."""
    try:
        from openpi_client.websocket_client_policy import WebsocketClientPolicy
    except ModuleNotFoundError:
        print("an unmodified client: openpi-client is not installed, so this half is left out")
        return
    host, _, port = url.removeprefix("ws://").partition(":")
    client = WebsocketClientPolicy(host, int(port))
    answer = client.infer({"observation/state": np.zeros(12, np.float32)})
    metadata = {name: value for name, value in client.get_server_metadata().items() if name.startswith("action_")}
    print(f"an unmodified client: {metadata}, actions {answer['actions'].shape}, {sorted(answer)}")


@specact.chunk_policy(observation={"state": (12,)}, chunk=8, actions=2, rate_hz=20.0, low=[-1.0, -1.0], high=[1.0, 1.0])
def draft(inputs: Mapping[str, NDArray[Any]]) -> NDArray[np.float32]:
    """Tilts the plate towards the goal: a controller that fits on any device, and does not know of the pillar."""
    ball, velocity, _, _, goal, _ = np.split(inputs["state"][:, -1], 6, axis=-1)
    return np.repeat(np.clip(1.2 * (goal - ball) - 1.2 * velocity, -1.0, 1.0)[:, None], 8, axis=1)


def drive(gate: Gate, pair: specact.Pair[Any], client: Client, robot: SimulatedRobot) -> None:
    """The draft acts; what the gate sends is verified by the server's answer, if it comes within one second."""
    policy = specact.SpeculativePolicy(pair, gate, verifier=remote_verifier(client, pair, deadline_ms=1000.0))
    origins, successes = Counter[Origin](), 0
    for episode in range(EPISODES):
        policy.reset(episode)
        robot.start(seed=episode)
        while not robot.done:
            robot.act(policy.act(robot.observe()))
            if policy.origin is not None:
                origins[policy.origin] += 1
        successes += robot.success
    sent = policy.counts["transmitted"] / policy.counts["steps"]
    shares = "".join(f"{origins[origin] / origins.total():10.2f}" for origin in Origin if origin in SHOWN)
    print(f"{type(gate).__name__:11s}  {sent:.2f}{shares}  {successes}/{EPISODES}")


SHOWN = (Origin.DRAFTED, Origin.ACCEPTED, Origin.REPLACED, Origin.FALLBACK)
try:
    ask_as_openpi_does()
    # The target is on the server alone; what it takes and gives is in its metadata.
    with specact.connect(f"openpi:{url}") as policy:
        spec = PairSpec(policy.spec, execute=4, accept_within=0.2)
    assert draft.units is not None
    pair = ChunkParts("chase", draft, draft.units, spec, None).pair()
    robot = SimulatedRobot(load_task("ball-chase"))
    contract = pair.exchange.contract
    print("\ngate         sent" + "".join(f"{origin.name.lower():>10s}" for origin in SHOWN) + "  success")
    with Client(target_endpoint(f"openpi:{url}", None, None, contract), contract) as client:
        client.connect(timeout=10.0)
        drive(Never(), pair, client, robot)
        drive(Controller(ActionDeviation(0.0), RateBudget(0.5)), pair, client, robot)
        drive(Always(), pair, client, robot)
finally:
    server.kill()
    server.wait()
print("\nNext: docs/how-to/openpi.md, which has the same as two commands, specact pair and specact run")
