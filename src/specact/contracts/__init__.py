"""Contract checks for user-defined environments, gates, robots, policies and families.

Each check raises :class:`~specact.errors.ContractError`, an ``AssertionError``, with a message that states what was
expected; call them in your tests. They show compatibility, not quality.
"""

from specact.contracts.gate import check_gate
from specact.contracts.pair import check_pair
from specact.contracts.policy import check_policy
from specact.contracts.robot import check_robot
from specact.contracts.task import check_task

__all__ = ["check_gate", "check_pair", "check_policy", "check_robot", "check_task"]
