"""``--policy.type=specact``: LeRobot's side of it; what chooses the actions is in ``robots.py``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import numpy as np
import torch
from lerobot.configs import PreTrainedConfig
from lerobot.policies.pretrained import PreTrainedPolicy
from numpy.typing import NDArray

from lerobot_policy_specact.configuration_specact import SpecactConfig
from lerobot_policy_specact.robots import Robots
from specact.errors import ConfigError
from specact.observation import lerobot_name

_PREFIX = "observation."


class SpecactPolicy(PreTrainedPolicy):
    """A policy that acts as specact's control loop does, one robot for each row of a batch.

    Args:
        config: the options.
        ignored: what LeRobot gives every policy.

    Raises:
        SpecactError: if the options cannot be used, or the server cannot be reached.
    """

    config_class = SpecactConfig
    name = "specact"

    def __init__(self, config: SpecactConfig, **ignored: Any) -> None:
        super().__init__(config)
        self._robots = Robots(config)

    @classmethod
    def from_pretrained(
        cls, pretrained_name_or_path: Any, *, config: SpecactConfig | None = None, **ignored: Any
    ) -> SpecactPolicy:
        """The policy of a configuration; there are no weights of LeRobot's. lerobot-rollout gives no path."""
        return cls(PreTrainedConfig.from_pretrained(pretrained_name_or_path) if config is None else config)

    def reset(self) -> None:
        """Starts an episode of every robot."""
        self._robots.reset()

    @torch.no_grad()
    def select_action(self, batch: dict[str, Any], **ignored: Any) -> torch.Tensor:
        """One action for every row, ``[B, A]``, within the deadline."""
        return torch.from_numpy(self._robots.act(rows(batch)))

    def predict_action_chunk(self, batch: dict[str, Any], **ignored: Any) -> NoReturn:
        """Refuses: gate, deadline and fallback act step by step.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "a policy of type specact gives one action at a time, by select_action; use --inference.type=sync, and "
            "--policy.execution=aligned or rtc where a chunk is to be inferred while the robot acts"
        )

    def forward(self, batch: dict[str, Any]) -> NoReturn:
        """Refuses, as the configuration's ``get_optimizer_preset``."""
        self.get_optim_params()

    def get_optim_params(self) -> NoReturn:
        """As :meth:`forward`."""
        self.config.get_optimizer_preset()
        raise AssertionError


def rows(batch: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The observations of a batch, row by row, by the names that specact gives them; camera frames as they were."""
    arrays = {lerobot_name(key): _array(value) for key, value in batch.items() if _observed(key, value)}
    if not arrays:
        raise ConfigError(f"LeRobot gave no observations; it gave {', '.join(batch) or 'nothing'}")
    count = len(next(iter(arrays.values())))
    told = batch.get("task", "")
    tasks = [told] * count if isinstance(told, str) else list(told)
    return [{name: array[row] for name, array in arrays.items()} | {"instruction": tasks[row]} for row in range(count)]


def _observed(key: str, value: Any) -> bool:
    return key.startswith(_PREFIX) and isinstance(value, torch.Tensor)


def _array(value: torch.Tensor) -> NDArray[Any]:
    """``[B, n]``, or frames ``[B, H, W, 3]`` of 0 to 255 in place of ``[B, 3, H, W]`` of 0 to 1."""
    if value.ndim != 4:
        return np.asarray(value.cpu().numpy(), np.float32)
    frames = value if value.dtype == torch.uint8 else (255.0 * value).round().clamp(0, 255).to(torch.uint8)
    return np.ascontiguousarray(frames.permute(0, 2, 3, 1).cpu().numpy())
