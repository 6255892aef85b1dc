"""What a policy of a recipe sees of its demonstrations."""

from __future__ import annotations

from specact.errors import ConfigError, unknown_name
from specact.lab.data.episodes import Episodes
from specact.lab.data.frames import Frames
from specact.lab.train.recipe import Demonstrated, Seeing
from specact.observation import Field, ObservationSpec


def observation_of(policy: Seeing, recipe: Demonstrated, episodes: Episodes, who: str) -> ObservationSpec:
    """The observations of a policy, with shapes and histories.

    Args:
        policy, recipe: say what it sees, and how much of it.
        episodes: the recipe's demonstrations.
        who: the policy, for messages.

    Raises:
        ConfigError: if it sees what is not there, or nothing with a history.
    """
    there = episodes.observation
    sees = policy.sees or tuple(name for name in there if name not in episodes.cameras)
    for name in (*sees, *policy.history):
        if name not in there:
            raise unknown_name(f"observation of {who}", name, there)
    if not sees:
        raise ConfigError(
            f"these demonstrations hold camera frames alone ({', '.join(episodes.cameras)}); say which of them {who} "
            'sees, as in sees = ["image"]'
        )

    def field(name: str) -> Field:
        array, source = there[name], recipe.observations.get(name)
        history = policy.history.get(name, None if source is None else source.history)
        if history is None:
            history = 0 if name.partition(".")[0] == "goal" else recipe.window
        return Field(array.shape[1:], "uint8" if isinstance(array, Frames) else "float32", history)

    spec = ObservationSpec({name: field(name) for name in sees})
    if not any(field.history for field in spec.fields.values()):
        raise ConfigError(f"{who} needs at least one observation with a history of 1 or more")
    return spec


def positions(spec: ObservationSpec) -> int:
    """P: how many of the newest positions see something of everything that has a history; only those predict."""
    return min(field.history for field in spec.fields.values() if field.history)
