"""Checks for your own environments, gates, robots, policies and families: what specact expects of them, tried on yours.

Each check raises :class:`~specact.errors.ContractError`, an ``AssertionError``, with a sentence that says what was
expected; call them in your tests. They cannot show that something works well, only that it will not break a run.
"""

from specact.contracts.gate import check_gate
from specact.contracts.pair import check_pair
from specact.contracts.policy import check_policy
from specact.contracts.robot import check_robot
from specact.contracts.task import check_task

__all__ = ["check_gate", "check_pair", "check_policy", "check_robot", "check_task"]
