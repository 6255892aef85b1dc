"""TISED's question: does a faster inference make the task faster?

A flow policy drives a ball to a goal that moves on, with ten, five, two or one steps of denoising. The world does not
stand still meanwhile. Needs: pip install 'specact[sim]'. Takes a few seconds.
"""

import numpy as np

from specact.execution import Execution
from specact.families.chunks import load_flow
from specact.lab.envs import load_task
from specact.lab.envs.robot import MovingWorld
from specact.lab.rollout.episode import Episode, run_episode
from specact.lab.tised import chunk_speedup

STEP_S = 0.03  # what one step takes on an imagined device; the whole inference, ten of them, takes .3 s
EPISODES, SEED = 10, 1
bundle = load_flow("ball-chase-flow")
world = MovingWorld(load_task("ball-chase"), pace=0.1)  # the goal goes on at .1 m/s


def drive(steps: int, execution: Execution) -> list[Episode]:
    """Episodes in which an inference takes as long as its steps."""
    policy = bundle.policy(steps=steps)
    return [
        run_episode(world, policy, execution, STEP_S * steps, start=episode, seed=SEED, episode=episode)
        for episode in range(EPISODES)
    ]


print("execution    steps  inference  faster chunks  observation's age  success  task time")
for execution in (Execution("synchronous", 8), Execution("aligned", 8, 4)):
    for steps in (10, 5, 2, 1):
        episodes = drive(steps, execution)
        predicted = chunk_speedup(10 * STEP_S, world.period_s, execution.execute, steps / 10, execution.overlap)
        age = np.mean([episode.age_s for episode in episodes])
        success = np.mean([episode.success for episode in episodes])
        task = np.mean([episode.task_s if episode.success else episode.limit_s for episode in episodes])
        print(
            f"{execution.kind:11s}  {steps:5d}  {STEP_S * steps:7.2f} s  {float(predicted):12.2f}x  {age:15.2f} s"
            f"  {success:7.2f}  {task:7.2f} s"
        )
print(
    f"\n{EPISODES} episodes each; a failed one counts as {world.limit_s:.0f} s. How fast chunks come is arithmetic;"
    "\nwhether the task becomes faster depends on the world and on how chunks are played."
)
print("Next: docs/results/tised.md, and specact tised sweep --bundle ball-chase-flow --levers steps naive aligned")
