"""Contract checks for user-defined environments, gates, robots, policies and families.

Each check raises :class:`~specact.errors.ContractError`, an ``AssertionError``, with a message that states what was
expected; what your own code raises passes through. Call them in your tests. They show compatibility, not quality.
"""

from specact.contracts.policies import check_gate, check_pair, check_policy
from specact.contracts.worlds import check_robot, check_task

__all__ = ["check_gate", "check_pair", "check_policy", "check_robot", "check_task"]
