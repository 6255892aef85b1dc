"""How chunks of actions are played while the next one is inferred."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, get_args

from specact.errors import ConfigError, unknown_name
from specact.families.chunks.policy import ChunkSpec

Kind = Literal["synchronous", "naive", "aligned", "roll_forward", "inpainting"]


class Executed(Protocol):
    """What has to be known of a chunk policy to execute it."""

    @property
    def spec(self) -> ChunkSpec:
        """What it needs to see, and what it gives."""
        ...

    @property
    def inpaints(self) -> bool:
        """Whether it understands inpainting."""
        ...


@dataclass(frozen=True)
class Execution:
    """What a robot does with chunks.

    ``n`` is ``execute``, ``m`` is ``overlap``. A next inference starts as soon as no more than m actions are left to
    play and no other is under way. Where the actions run out before the new chunk is there, the robot idles.

    - ``synchronous``: stop, think, play the first n actions. m is 0.
    - ``naive``: think while the last m actions run; the new chunk follows the old one and is played from its first
      action, n actions of it. It was made for the world as it was ``max(T_inf, m T_act)`` before. The asynchronous
      inference of "The Speedup Paradox" (arXiv 2606.28529): a chunk takes ``n T_act + max(0, T_inf - m T_act)``.
    - ``roll_forward``: the same, but the policy is shown the robot as it will be after the m actions; the world it
      shows is as old as before (VLASH, arXiv 2512.01031).
    - ``aligned``: actions are stamped with the time they are for, the first with the observation's. When a chunk
      arrives, what of its first n actions is past is dropped and the rest takes the place of what was left to play
      (LeRobot's asynchronous inference with the newest chunk winning). Where a chunk takes longer than n actions
      nothing of it is left, and the robot stands still.
    - ``inpainting``: ``aligned``, and the new chunk is made to go on from the old one (real-time chunking, arXiv
      2506.07339), see :func:`~specact.execution.inpainting.soft_mask`.

    Attributes:
        kind: one of the above.
        execute: n, actions of a chunk that are played, at least 1.
        overlap: m, actions during which the next inference runs, 0 to n.

    Raises:
        ConfigError: for an unknown kind or numbers out of range.
    """

    kind: Kind
    execute: int
    overlap: int = 0

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise unknown_name("execution", self.kind, get_args(Kind))
        most = 0 if self.kind == "synchronous" else self.execute
        if self.execute < 1 or not 0 <= self.overlap <= most:
            raise ConfigError(
                f"{self.kind} execution plays at least 1 action of a chunk and overlaps 0 to {most} of them with the "
                f"next inference, got execute {self.execute} and overlap {self.overlap}"
            )

    @property
    def by_time(self) -> bool:
        """Whether actions are played at the time they are for, or one after the other."""
        return self.kind in ("aligned", "inpainting")

    def check(self, policy: Executed, *, rolls_forward: bool) -> None:
        """Refuses a policy or a world that cannot be run so.

        Args:
            policy: what is to be executed.
            rolls_forward: whether there is a model of the robot to roll its state forward with.

        Raises:
            ConfigError: if chunks are too short, or what the kind needs of policy or world is not there.
        """
        if self.execute > policy.spec.chunk:
            raise ConfigError(
                f"this policy's chunks have {policy.spec.chunk} actions, so execute must be at most that; "
                f"got execute {self.execute}"
            )
        if self.kind == "inpainting" and not policy.inpaints:
            raise ConfigError("this policy cannot inpaint; choose aligned execution for it, or a flow policy")
        if self.kind == "roll_forward" and not rolls_forward:
            raise ConfigError(
                "this execution needs a model of the robot, and there is none; give the robot a method "
                "roll_forward(observation, actions), or the task one, or choose naive execution"
            )
