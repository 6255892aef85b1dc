"""How many examples a property is checked on, where 100 are too many or too few."""

from hypothesis import settings


def example_count(count: int) -> settings:
    """``count`` in every test run, and more in the same proportion where `scripts/check explore` asks for more."""
    return settings(max_examples=count * settings().max_examples // 100)
