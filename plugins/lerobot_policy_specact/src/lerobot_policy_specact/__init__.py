"""specact's policies, robots and environments in LeRobot: importing this registers them, as LeRobot does by itself."""

from lerobot_policy_specact.config_specact_sim import SpecactSimConfig
from lerobot_policy_specact.configuration_specact import SpecactConfig
from lerobot_policy_specact.specact_env import SpecactEnvConfig

__all__ = ["SpecactConfig", "SpecactEnvConfig", "SpecactSimConfig"]
