"""The film of a report: one episode under draft, ADAHI and target, side by side."""

from __future__ import annotations

from dataclasses import dataclass

from specact.errors import DataError
from specact.lab.evaluation.film import Film, load_film
from specact.lab.report.runs import Run

FILMED = ("draft", "adahi", "target")


@dataclass(frozen=True)
class EpisodeFilm:
    """A film, and the reason for the choice of its episode."""

    film: Film
    why: str


def show_film(run: Run, filmed: tuple[str, str, str] = FILMED) -> EpisodeFilm:
    """The film of one episode of this run, preferably one where the second method succeeds and the first fails.

    Args:
        run: an evaluation.
        filmed: three methods: a baseline, the one to compare, and an upper bound.

    Raises:
        DataError: if the run has none of the methods, or its table of episodes cannot be read.
        ConfigError, BundleError: see :func:`~specact.lab.evaluation.film.load_film`.
    """
    methods = [method for method in filmed if method in run.methods]
    if not methods:
        raise DataError(f"{run.folder} has none of the methods {', '.join(filmed)}")
    outcomes = {method: run.outcomes(method) for method in methods}
    won = {method: dict(zip(o["episode"], o["success"], strict=True)) for method, o in outcomes.items()}
    episode, why = _choose([won.get(method, {}) for method in filmed])
    longest = max(int(o["steps"][o["episode"] == episode].max()) for o in outcomes.values())
    film = load_film(run.folder, run.manifest, episode, methods, longest)
    others = [screen.method for screen in film.screens if screen.success != won[screen.method][episode]]
    if others:
        why += (
            f" Simulated again, alone instead of in a batch, {', '.join(others)} ended otherwise than in the tables: "
            "the last bits of a float differ."
        )
    return EpisodeFilm(film, why)


def _choose(success: list[dict[int, bool]]) -> tuple[int, str]:
    """The episode to show, and the reason: the first in which ADAHI succeeds and the draft fails, if there is one."""
    episodes = [int(episode) for episode in sorted(set.intersection(*(set(won) for won in success if won)))]
    draft, adahi, target = success
    gained = [episode for episode in episodes if not draft.get(episode, True) and adahi.get(episode)]
    lost = sum(bool(draft.get(episode)) and not adahi.get(episode, True) for episode in episodes)
    if not gained:
        return episodes[0], "The first episode: in none did the draft fail and ADAHI succeed."
    # Preferably one in which the target succeeds too.
    episode = next((episode for episode in gained if target.get(episode)), gained[0])
    return episode, (
        f"One of {len(gained)} episodes, out of {len(episodes)}, in which the draft failed and ADAHI succeeded; "
        f"in {lost} it is the other way round."
    )
