"""Ball chase: plate and ball with a moving goal, for policies that observe its motion.

A bundle's goal is only the newest vector, without velocity. So here position and velocity of the goal are part of the
state, and there is no separate goal. Physics, success and expert are those of :mod:`specact.lab.envs.ball`.
"""

from __future__ import annotations

from dataclasses import replace

from specact.lab.envs import ball


def make(render_mode: str | None = None, pace: float | None = None) -> ball.BallEnv:
    """The environment; without a pace every episode draws its own, for diverse demonstrations."""
    return ball.BallEnv(render_mode, pace, goal_in_state=True)


TASK = replace(ball.TASK, name="ball-chase", make=make)
