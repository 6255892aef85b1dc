"""A server with the target, a robot that asks it under a deadline, and what happens when the server is killed.

Needs: pip install 'specact[server]'. Takes a few seconds. The robot is made up: it only notes what it is told to do.
"""

import subprocess
import sys
from collections import Counter

import numpy as np
from numpy.typing import NDArray

import specact
from specact.gates import Always
from specact.remote import Client, Endpoint, remote_verifier
from specact.robot import Tick, run_loop
from specact.safety import Fallback
from specact.types import Clock

PERIOD_S, TICKS, KILLED_AT = 0.02, 120, 60


class Arm:
    """Two joints that move with the velocities they are given."""

    def __init__(self) -> None:
        self.state, self.acted = np.zeros(8), list[NDArray[np.float32]]()

    def observe(self) -> dict[str, NDArray[np.float64]]:
        return {"state": self.state, "goal": np.array([0.5, 0.0])}

    def act(self, action: NDArray[np.float32]) -> None:
        self.acted.append(action)


# On the server: `specact serve ball`. Port 0 takes a free one; the address is in what it says first.
words = [sys.executable, "-m", "specact", "serve", "ball", "--port", "0"]
server = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
assert server.stderr is not None
url = next(word.rstrip(";") for line in server.stderr for word in line.split() if word.startswith("ws://"))

# On the robot: a step waits 15 ms at most. Then the draft acts; after 6 misses in a row the robot stops.
bundle, arm, ticks, acted = specact.load_pair("ball"), Arm(), list[Tick](), list[str]()
stop_action = np.zeros(2, np.float32)
fallback = Fallback("execute_draft", max_consecutive_misses=6, stop_action=tuple(stop_action))


def note(tick: Tick) -> None:
    """What the control loop tells of each period."""
    ticks.append(tick)
    acted.append("stopped" if policy.safety.stopped else policy.origin.name.lower() if policy.origin else "nothing")
    if len(ticks) == KILLED_AT:
        server.kill()


try:
    with Client(Endpoint.parse(url), bundle.exchange.contract) as client:
        client.connect(timeout=30.0)
        verifier = remote_verifier(client, bundle, deadline_ms=15.0)
        policy = specact.SpeculativePolicy(bundle, Always(), verifier=verifier, fallback=fallback)
        run_loop(arm, policy, PERIOD_S, Clock(), lambda: len(ticks) < TICKS, note)
finally:
    server.kill()
    server.wait()

print(f"{url} was killed after step {KILLED_AT}\n")
print("steps    inferences  missed           where the executed actions come from")
for part in (slice(0, KILLED_AT), slice(KILLED_AT, TICKS)):
    records = [tick.record for tick in ticks[part] if tick.record is not None]
    misses = Counter(record.miss for record in records if record.miss is not None)
    missed, origins = (
        ", ".join(f"{name} {count}" for name, count in found.items()) or "none"
        for found in (misses, Counter(acted[part]))
    )
    print(f"{part.start + 1:3d}-{part.stop:3d}  {len(records):10d}  {missed:15s}  {origins}")
print(f"\nactions sent: {len(arm.acted)}, all finite: {np.isfinite(arm.acted).all()}")
print(f"the last one is the stop action: {np.array_equal(arm.acted[-1], stop_action)}")
print("\nNext: docs/start/simulated.md; specact run ball --server ws://... drives a simulated ball like this")
