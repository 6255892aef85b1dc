"""Writes demonstrations as arrays, here made up: a hand that moves to a light, recorded with a camera."""

import numpy as np

EPISODES, STEPS, SIDE = 30, 40, 24

rng = np.random.default_rng(0)
joints, targets, frames, actions = [], [], [], []
for _ in range(EPISODES):
    hand, light = rng.uniform(-0.8, 0.8, (2, 2))
    for _ in range(STEPS):
        frame = np.zeros((SIDE, SIDE, 3), np.uint8)
        row, column = ((light + 1.0) / 2.0 * (SIDE - 1)).astype(int)
        frame[row, column] = 255
        joints.append(np.concatenate([hand, rng.normal(0.0, 0.01, 2)]))
        targets.append(light)
        frames.append(frame)
        actions.append(np.clip(light - hand, -0.2, 0.2))
        hand = hand + 0.2 * actions[-1]

np.savez_compressed(
    "demos.npz",
    joints=np.array(joints, np.float32),  # one row for every control step
    target=np.array(targets, np.float32),
    camera=np.array(frames),  # [N, height, width, 3]
    action=np.array(actions, np.float32),
    episode_ends=STEPS * np.arange(1, EPISODES + 1),
)
