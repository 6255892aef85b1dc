"""One episode under draft, ADAHI and target, side by side in the page."""

from __future__ import annotations

import base64
import json
from itertools import groupby

from specact.errors import SpecactError
from specact.lab.evaluation.film import RATE_HZ, Film, load_films
from specact.lab.report.html import Html, fill, join
from specact.lab.report.runs import Run
from specact.lab.report.tables import name_of

FILMED = ("draft", "adahi", "target")

# Part of a page, and why there are no films, where there are none.
Films = tuple[Html, str | None]


def show_films(run: Run) -> Films:
    """The films of a telling episode of this run."""
    methods = [method for method in FILMED if method in run.methods]
    if not methods:
        return Html(), f"no films: {run.folder} has none of the methods {', '.join(FILMED)}"
    try:
        outcomes = {method: run.outcomes(method) for method in methods}
        episode, why = _choose({m: dict(zip(o["episode"], o["success"], strict=True)) for m, o in outcomes.items()})
        longest = max(int(o["steps"][o["episode"] == episode].max()) for o in outcomes.values())
        films = load_films(run.folder, run.manifest, episode, methods, longest)
    except SpecactError as error:
        return Html(), f"no films: {error}"
    recorded = {m: bool(o["success"][o["episode"] == episode][0]) for m, o in outcomes.items()}
    other = [film.method for film in films if film.success != recorded[film.method]]
    if other:
        why += (
            f" Simulated again, alone instead of in a batch, {', '.join(other)} ended otherwise than in the tables: "
            "the last bits of a float differ."
        )
    last = max(film.steps for film in films)
    clock = max((film.frame_steps for film in films), key=lambda steps: steps[-1])
    return fill(
        "film.html",
        episode=episode,
        why=why,
        screens=join(_screen(film, last) for film in films),
        frames=len(clock) - 1,
        rate=f"{RATE_HZ:g}",
        speed=f"{RATE_HZ * clock[1] / films[0].rate_hz:g}",
        clock=json.dumps([round(step / films[0].rate_hz, 2) for step in clock]),
    ), None


def _choose(success: dict[str, dict[int, bool]]) -> tuple[int, str]:
    """The episode to show, and why: where ADAHI does what the draft cannot, if there is such a one."""
    episodes = [int(episode) for episode in sorted(set.intersection(*(set(won) for won in success.values())))]
    draft, adahi, target = (success.get(method, {}) for method in FILMED)
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


def _screen(film: Film, last: int) -> Html:
    share = sum(film.sent) / len(film.sent)
    ending = "success" if film.success else "failure"
    return fill(
        "screen.html",
        method=name_of(film.method),
        plain=film.method,
        ending=ending,
        share=f"{share:.0%}",
        seconds=f"{film.steps / film.rate_hz:.1f}",
        sheet=_data(film.sheet),
        poster=_data(film.poster),
        size=film.size_px,
        columns=film.columns,
        steps=json.dumps(film.frame_steps),
        sent="".join("1" if sent else "0" for sent in film.sent),
        last=last,
        done=film.steps,
        path=_marks(film.sent),
    )


def _marks(sent: tuple[bool, ...]) -> str:
    """The transmitted steps as an SVG path: a bar per run of them, one unit per step."""
    path, start = "", 0
    for was_sent, run in groupby(sent):
        count = len(list(run))
        path += f"M{start} 0h{count}v1h-{count}z" if was_sent else ""
        start += count
    return path


def _data(webp: bytes) -> str:
    return "data:image/webp;base64," + base64.b64encode(webp).decode()
