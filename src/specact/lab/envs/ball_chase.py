"""Ball chase: the plate and ball with a goal on the move, for policies that can see its motion.

A bundle's goal is one vector, the newest; where it is heading cannot be told from it. So position and velocity of the
goal are part of the state here, and there is no goal beside it. Physics, success and expert are those of
:mod:`specact.lab.envs.ball`.
"""

from __future__ import annotations

from dataclasses import replace

from specact.lab.envs import ball


def make(render_mode: str | None = None, pace: float | None = None) -> ball.BallEnv:
    """The environment; without a pace every episode draws its own, as demonstrations should."""
    return ball.BallEnv(render_mode, pace, goal_in_state=True)


TASK = replace(ball.TASK, name="ball-chase", make=make)
