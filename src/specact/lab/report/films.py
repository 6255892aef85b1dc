"""One episode under draft, ADAHI and target, side by side in the page."""

from __future__ import annotations

from dataclasses import dataclass

from specact.errors import DataError
from specact.lab.evaluation.film import Film, load_film
from specact.lab.report.runs import Run

FILMED = ("draft", "adahi", "target")


@dataclass(frozen=True)
class Shown:
    """A film, and why it shows this episode."""

    film: Film
    why: str


def show_film(run: Run, filmed: tuple[str, str, str] = FILMED) -> Shown:
    """The film of a telling episode of this run.

    Args:
        run: an evaluation.
        filmed: three methods: one that may fail, one that is to do better, and one that says what can be done.

    Raises:
        DataError: if no method of the run is filmed, or its table of episodes cannot be read.
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
    other = [screen.method for screen in film.screens if screen.success != won[screen.method][episode]]
    if other:
        why += (
            f" Simulated again, alone instead of in a batch, {', '.join(other)} ended otherwise than in the tables: "
            "the last bits of a float differ."
        )
    return Shown(film, why)


def _choose(success: list[dict[int, bool]]) -> tuple[int, str]:
    """The episode to show, and why: where ADAHI does what the draft cannot, if there is such a one."""
    episodes = [int(episode) for episode in sorted(set.intersection(*(set(won) for won in success if won)))]
    draft, adahi, target = success
    gained = [episode for episode in episodes if not draft.get(episode, True) and adahi.get(episode)]
    lost = sum(bool(draft.get(episode)) and not adahi.get(episode, True) for episode in episodes)
    if not gained:
        return episodes[0], "The first episode: in none did the draft fail and ADAHI succeed."
    # Best one that the target, too, can do.
    shown = next((episode for episode in gained if target.get(episode)), gained[0])
    return shown, (
        f"One of {len(gained)} episodes, out of {len(episodes)}, in which the draft failed and ADAHI succeeded; "
        f"in {lost} it is the other way round."
    )
