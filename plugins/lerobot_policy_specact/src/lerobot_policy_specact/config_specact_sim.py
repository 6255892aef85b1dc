"""The options of ``--robot.type=specact_sim``."""

from __future__ import annotations

from dataclasses import dataclass, field

from lerobot.robots import RobotConfig


@RobotConfig.register_subclass("specact_sim")
@dataclass(kw_only=True)
class SpecactSimConfig(RobotConfig):
    """A simulated robot of specact's.

    Attributes:
        env: its environment: a name such as pusht, NAME/TASK of a suite, or MODULE:TASK.
        seed, episode: its start, as in specact run and specact eval.
        frames: cameras that are drawn, by the name of the observation: height and width.
        sees: names of the observations that it shows; all if not given.
    """

    env: str = "pusht"
    seed: int = 0
    episode: int = 0
    frames: dict[str, list[int]] = field(default_factory=dict)
    sees: list[str] | None = None
