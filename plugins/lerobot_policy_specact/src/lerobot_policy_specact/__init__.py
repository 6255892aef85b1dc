"""specact's policies and simulated robots in LeRobot: importing this registers them, as LeRobot does by itself."""

from lerobot_policy_specact.config_specact_sim import SpecactSimConfig
from lerobot_policy_specact.configuration_specact import SpecactConfig

__all__ = ["SpecactConfig", "SpecactSimConfig"]
