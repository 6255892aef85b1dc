"""What LeRobot does to observations and actions around the policy: next to nothing."""

from __future__ import annotations

from typing import Any

from lerobot.processor import (
    AddBatchDimensionProcessorStep,
    PolicyProcessorPipeline,
    RenameObservationsProcessorStep,
    policy_action_to_transition,
    transition_to_policy_action,
)
from lerobot.utils.constants import POLICY_POSTPROCESSOR_DEFAULT_NAME, POLICY_PREPROCESSOR_DEFAULT_NAME

from lerobot_policy_specact.configuration_specact import SpecactConfig


def make_specact_pre_post_processors(config: SpecactConfig, dataset_stats: Any = None) -> tuple[Any, Any]:
    """Both pipelines; statistics are not needed, as observations and actions are in the environment's units."""
    before = [RenameObservationsProcessorStep(rename_map=config.rename_map), AddBatchDimensionProcessorStep()]
    return (
        PolicyProcessorPipeline(steps=before, name=POLICY_PREPROCESSOR_DEFAULT_NAME),
        PolicyProcessorPipeline(
            steps=[],
            name=POLICY_POSTPROCESSOR_DEFAULT_NAME,
            to_transition=policy_action_to_transition,
            to_output=transition_to_policy_action,
        ),
    )
