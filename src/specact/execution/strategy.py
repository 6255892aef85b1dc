"""Execution strategies: how chunks of actions are played while the next one is inferred."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from specact.errors import ConfigError
from specact.families.chunks.policy import ChunkSpec
from specact.records import Count, WholeNumber, check_fields

Kind = Literal["synchronous", "naive", "aligned", "roll_forward", "inpainting"]


@dataclass(frozen=True)
class Execution:
    """How a robot executes chunks.

    ``n`` is ``execute``, ``m`` is ``overlap``. The next inference starts as soon as at most m actions remain and no
    other inference is running. If the actions run out before the new chunk arrives, the robot idles.

    - ``synchronous``: the robot waits for the inference, then plays the first n actions. m is 0.
    - ``naive``: the inference runs during the last m actions; the new chunk follows the old one and its first n actions
      are played. Its observation is ``max(T_inf, m T_act)`` old by then. The asynchronous inference of "The Speedup
      Paradox" (arXiv 2606.28529): a chunk takes ``n T_act + max(0, T_inf - m T_act)``.
    - ``roll_forward``: as ``naive``, but the robot's state in the observation is rolled forward through the m actions;
      the rest of the observation is as stale as before (VLASH, arXiv 2512.01031).
    - ``aligned``: actions have timestamps, the first one that of the observation. When a chunk arrives, those of its
      first n actions that are past are dropped and the others replace the remaining actions (LeRobot's asynchronous
      inference, where the newest chunk wins). If an inference takes longer than n actions, nothing of its chunk is
      played and the robot idles.
    - ``inpainting``: ``aligned``, with a new chunk that is consistent with the old one (real-time chunking, arXiv
      2506.07339), see :func:`~specact.execution.schedule.soft_mask`.

    Attributes:
        kind: one of the above.
        execute: n, number of actions of a chunk that are played, at least 1.
        overlap: m, number of actions during which the next inference runs, 0 to n.

    Raises:
        ConfigError: for an unknown kind or numbers out of range.
    """

    kind: Kind
    execute: Count
    overlap: WholeNumber = 0

    def __post_init__(self) -> None:
        check_fields(self)
        most = 0 if self.kind == "synchronous" else self.execute
        if self.overlap > most:
            raise ConfigError(f"overlap must be at most {most} in {self.kind} execution, got {self.overlap}")

    @property
    def by_time(self) -> bool:
        """Whether actions are played by timestamp; otherwise one after the other."""
        return self.kind in ("aligned", "inpainting")

    def check(self, spec: ChunkSpec, *, inpaints: bool, rolls_forward: bool) -> None:
        """Refuses a policy that cannot be executed in this way.

        Args:
            spec: of its chunks.
            inpaints: whether it supports inpainting.
            rolls_forward: whether there is a model of the robot to roll its state forward with.

        Raises:
            ConfigError: if chunks are too short, or inpainting or the model of the robot is needed but missing.
        """
        if self.execute > spec.chunk:
            raise ConfigError(f"execute must be at most the {spec.chunk} actions of a chunk, got {self.execute}")
        if self.kind == "inpainting" and not inpaints:
            raise ConfigError("this policy cannot inpaint; choose aligned execution for it, or a flow policy")
        if self.kind == "roll_forward" and not rolls_forward:
            raise ConfigError(
                "this execution needs a model of the robot, and there is none; give the robot a method "
                "roll_forward(observation, actions), or the task one, or choose naive execution"
            )
