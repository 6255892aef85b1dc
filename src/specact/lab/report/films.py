"""The film of a report: one episode under up to three methods, side by side."""

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
        filmed: three methods: a baseline, the one to compare, and an upper bound; where the run has none of them, its
            first three methods.

    Raises:
        DataError: if the table of episodes cannot be read.
        ConfigError, BundleError: see :func:`~specact.lab.evaluation.film.load_film`.
    """
    methods = [method for method in filmed if method in run.methods] or list(run.methods)[:3]
    if not methods:
        raise DataError(f"{run.folder} has no methods")
    outcomes = {method: run.outcomes(method) for method in methods}
    won = {method: dict(zip(o["episode"], o["success"], strict=True)) for method, o in outcomes.items()}
    episode, why = _choose(won, *(filmed if filmed[0] in won or filmed[1] in won else [*methods, "", ""])[:2])
    longest = max(int(o["steps"][o["episode"] == episode].max()) for o in outcomes.values())
    film = load_film(run.folder, run.manifest, episode, methods, longest)
    others = [screen.method for screen in film.screens if screen.success != won[screen.method][episode]]
    if others:
        why += (
            f" Simulated again, alone instead of in a batch, {', '.join(others)} ended otherwise than in the tables: "
            "the last bits of a float differ."
        )
    return EpisodeFilm(film, why)


def _choose(won: dict[str, dict[int, bool]], baseline: str, method: str) -> tuple[int, str]:
    """The episode to show, and the reason: the first that the method wins and the baseline loses, if there is one."""
    episodes = sorted(set.intersection(*map(set, won.values())))
    first, second = won.get(baseline, {}), won.get(method, {})
    gained = [episode for episode in episodes if not first.get(episode, True) and second.get(episode)]
    lost = sum(bool(first.get(episode)) and not second.get(episode, True) for episode in episodes)
    if not gained:
        return int(episodes[0]), f"The first episode: in none did {baseline} fail and {method} succeed."
    # Preferably one that all others win.
    won_by_others = (e for e in gained if all(result[e] for name, result in won.items() if name != baseline))
    return int(next(won_by_others, gained[0])), (
        f"One of {len(gained)} episodes, out of {len(episodes)}, in which {baseline} failed and {method} succeeded; "
        f"in {lost} it is the other way round."
    )
