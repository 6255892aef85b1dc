"""Calibrates a gate for a transmission rate, and sees the rate hold on episodes that it was not calibrated on.

Needs: pip install 'specact[sim]'. Takes ten seconds or so.
"""

import specact
from specact.gates import ActionDeviation, Always, Gate
from specact.lab.envs import load_task
from specact.lab.envs.robot import SimulatedRobot
from specact.lab.evaluation.calibrate import calibrate

RATE = 0.4
EPISODES = 40
bundle = specact.load_pair("ball")
robot = SimulatedRobot(load_task(bundle.env))


def drive(gate: Gate) -> tuple[float, float]:
    """Transmission rate and success over episodes that no calibration uses."""
    policy, successes = specact.SpeculativePolicy(bundle, gate), 0
    for episode in range(EPISODES):
        policy.reset(episode)
        robot.start(seed=episode)
        while not robot.done:
            robot.act(policy.act(robot.observe()))
        successes += robot.success
    return policy.counts["transmitted"] / policy.counts["steps"], successes / EPISODES


# A gate changes the states that it later sees. So a threshold is tried on the states it leads to, and corrected.
found = calibrate(bundle, "adahi", RATE, episodes=40, rounds=3)
print(f"calibration of the action deviation for a rate of {RATE}")
for number, tried in enumerate(found.rounds):
    basis = "the target's own states" if number == 0 else "the rounds before"
    print(f"  threshold {tried['threshold']:.3f} from {basis}: rate {tried['rate']:.2f}")
print(f"  threshold {found.settings.threshold:.3f} in the end, on held-out episodes: {found.held_out['rate']:.2f}")

gates = {
    "the first round's threshold": ActionDeviation(found.rounds[0]["threshold"]),
    "calibrated here": found.settings.build(bundle),
    "calibrated by the bundle's maker": specact.calibrated_gate(bundle, "adahi", RATE),
    "always sent (hybrid)": Always(),
}
print(f"\n{'gate':34s}  rate  success   ({EPISODES} other episodes)")
for name, gate in gates.items():
    rate, success = drive(gate)
    print(f"{name:34s}  {rate:.2f}  {success:.2f}")
print("\nThe command for this: specact calibrate ball --gate adahi --rate 0.4")
print("Next: docs/results/gates.md, and specact run --hold, which holds a rate online without a calibration")
