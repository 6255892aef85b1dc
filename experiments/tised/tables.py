"""Tables and pictures of sweeps, from stored results; a row is one setting of a lever at one place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from numpy.typing import NDArray

from experiments.tables import interval_text, markdown, optional_text, table
from experiments.tised.findings import FRONTIER, method_of
from specact.lab.report.figures import INK, MUTED, blank, legend_below, style_of
from specact.lab.rollout.statistics import Contrast, contrast, holm
from specact.lab.tised.drivers import ON_BOARD

Row = Mapping[str, Any]
# End points of every episode, by lever, strength and link.
Outcomes = dict[tuple[str, float, str], dict[str, NDArray[np.float64]]]

# Marker, whether it is filled, and label of the levers at their strengths.
MARKERS = {
    ("verification", 1.0): ("o", True, "hybrid"), ("verification", 0.6): ("o", False, "ADAHI"),
    ("chance", 0.6): ("X", False, "random"), ("late", 1.0): ("s", True, "late"),
    ("late", 0.6): ("s", False, "late ADAHI"), ("verification", 0.0): ("v", True, "nothing verified"),
}  # fmt: skip
TITLES = {
    1: "A faster chunk and a slower task",
    2: "A setting that is worse where least is stale, and succeeds more often where more is",
    3: "A sweet spot that moves with the hardware or the link",
}


def frontier(sweeps: Mapping[str, Row]) -> str:
    """Success of every method over the round trip, for every pair, pace and idle mode of the sweeps."""
    found = {pair: list(_methods(sweep)) for pair, sweep in sorted(sweeps.items())}
    links = {cell["link"] for cells in found.values() for _, cell in cells} - {ON_BOARD}
    columns, rows = sorted(links, key=_order), []
    for pair, cells in found.items():
        for pace, idle in sorted({(cell["pace"], cell["idle"]) for _, cell in cells}):
            for method in FRONTIER:
                own = (method, pace, idle)
                here = {cell["link"]: cell for name, cell in cells if (name, cell["pace"], cell["idle"]) == own}
                shown = (here.get(link, here.get(ON_BOARD)) for link in columns)
                values = ("-" if cell is None else f"{cell['success.mean']:.3f}" for cell in shown)
                rows.append([f"{pair}, {pace:g}, {idle}", method, *values])
    return markdown(["pair, pace, idle", "method", *map(_title, columns)], rows)


def idling(sweep: Row) -> str:
    """Success of every method over one link, with each idle mode."""
    cells = list(_methods(sweep))
    ways = sorted({cell["idle"] for _, cell in cells})
    by_method = {method: {cell["idle"]: cell for found, cell in cells if found == method} for method in FRONTIER}
    rows = [[name, *(_interval(here[way], "success", 3) for way in ways)] for name, here in by_method.items() if here]
    return markdown(["method", *(f"idle `{way}`" for way in ways)], rows)


def _methods(sweep: Row) -> Iterator[tuple[str, Row]]:
    """The cells of the frontier's methods in a sweep, with their names."""
    for cell in sweep["cells"]:
        method = method_of(cell["lever"], cell["strength"])
        if method is not None:
            yield method, cell


def levers(sweep: Row) -> str:
    """Success and restricted mean time of every setting of one sweep over hardware and links."""
    cells = sweep["cells"]
    places = sorted({(c["kappa"], c["hardware"], c["link"]) for c in cells}, key=lambda at: (at[0], _rtt(at[2]), at[2]))
    by_setting: dict[tuple[str, float, float], dict[tuple[float, str, str], str]] = {}
    for cell in cells:
        text = f"{cell['success.mean']:.3f}, {cell['restricted_s.mean']:.2f} s"
        setting = by_setting.setdefault((cell["lever"], cell["strength"], cell["pace"]), {})
        setting[cell["kappa"], cell["hardware"], cell["link"]] = text
    heads = [
        f"{hardware} (x {kappa:g})" + ("" if link == ON_BOARD else f", {_title(link)}")
        for kappa, hardware, link in places
    ]
    rows = [
        [f"{lever} {strength:g}", f"{pace:g}", *(here[place] for place in places)]
        for (lever, strength, pace), here in by_setting.items()
    ]
    return markdown(["lever", "pace", *heads], rows)


def _title(link: str) -> str:
    steady = link.startswith("loopback")
    return f"{_rtt(link):g} ms" if steady else "recorded Wi-Fi" if link.startswith("rtt") else "recorded LTE"


def _rtt(link: str) -> float:
    return float(link.partition("=")[2] or 0.0)


def _order(link: str) -> tuple[bool, float, str]:
    return not link.startswith("loopback"), _rtt(link), link


def outcomes_of(sweep: Row) -> Outcomes:
    """The end points of every episode of a sweep."""
    return {
        (row["lever"], row["strength"], row["link"]): {
            point: np.array(row[point], np.float64) for point in ("success", "restricted_s")
        }
        for row in sweep["outcomes"]
        if (row["lever"], row["strength"]) != ("chance", 1.0)  # the same as verification 1
    }


def between(decoded: Mapping[str, Outcomes]) -> str:
    """Every two decodings under the same lever over the same link, paired; Holm over the table for each end point."""
    pairs, common = list(combinations(decoded, 2)), set.intersection(*map(set, decoded.values()))
    # Without a verification a link has no effect, so that one of them is enough.
    first = min((link for _, _, link in common), key=_order)
    settings = sorted(
        (at for at in common if at[1] > 0.0 or at[2] == first), key=lambda at: (at[0], -at[1], _order(at[2]))
    )
    cells: list[tuple[list[Contrast], Iterator[float]]] = []
    for point in ("success", "restricted_s"):
        tests = [contrast(decoded[one][at][point], decoded[two][at][point]) for at in settings for one, two in pairs]
        cells.append((tests, iter(holm([test.p for test in tests]))))
    (won, won_p), (took, took_p) = cells
    texts = iter([
        f"{_marked(f'{a.difference.mean:+.3f}', p)}, {_marked(f'{b.difference.mean:+.2f} s', q)}"
        for a, p, b, q in zip(won, won_p, took, took_p, strict=True)
    ])  # fmt: skip
    rows = [
        [f"{lever} {strength:g}", _title(link) if strength else "any", *(next(texts) for _ in pairs)]
        for lever, strength, link in settings
    ]
    return markdown(["lever", "link", *(f"{one} - {two}" for one, two in pairs)], rows)


def _marked(text: str, p: float) -> str:
    """P where it is below .05."""
    return f"{text} (**p {p:.2g}**)" if p < 0.05 else text


def whole(name: str, found: Row) -> str:
    """Every cell, gate, comparison and finding of a sweep."""
    times = ", ".join(
        f"{label} {' + '.join(f'{part:.3f}' for part in parts)}" for label, parts in found["latency_ms"].items()
    )
    rows = []
    for cell in found["cells"]:
        place = f"{cell['lever']}, {cell['task']} at {cell['pace']:g}, {cell['idle']}, {cell['hardware']}"
        rows.append([
            place if cell["link"] == ON_BOARD else f"{place}, {cell['link']}", f"{cell['strength']:g}", cell["n"],
            _interval(cell, "success", 3), optional_text(cell["chunks"], 1), optional_text(cell["chunk_s"], 3),
            optional_text(cell["task_s"], 2), _interval(cell, "restricted_s", 2),
            *(_ms(cell[key]) for key in ("inference_s", "stall_s", "age_s")), optional_text(cell["jerk"], 1),
            optional_text(cell["path"], 2), optional_text(cell["transmission_rate"], 2),
        ])  # fmt: skip
    heads = (
        "place", "strength", "n", "success [95 %]", "N", "T chunk s", "T task s", "restricted s [95 %]", "T inf ms",
        "stall ms", "age ms", "jerk", "path", "sent",
    )  # fmt: skip
    parts = [f"### {name}", f"`{found['command']}`", f"Measured on this machine, ms: {times}", markdown(heads, rows)]
    if found["calibrations"]:
        parts += ["Gates, each calibrated where it runs:", _gates(found["calibrations"])]
    if found["methods"]:
        told = f"difference of success [95 %], exact McNemar, Holm over all {len(found['methods'])} pairs:"
        parts += [f"Methods pair by pair: {told}", _comparisons(found["methods"])]
    for number, title in TITLES.items():
        here = [finding for finding in found["findings"] if finding["number"] == number]
        if here:
            about = ((f"**{one['about']}**" if one["seen"] else one["about"], one["words"]) for one in here)
            parts.append(f"{number}. {title}: seen {sum(one['seen'] for one in here)} times of {len(here)}.")
            parts.append("\n".join(f"   - {place}: {words}" for place, words in about))
    return "\n\n".join(parts) + "\n"


def _gates(rows: Sequence[Row]) -> str:
    """The calibrated gates of every place, and their rates on held-out episodes."""
    return table(
        "gate of | wanted | threshold | held out | sent | episodes | inferences",
        "{lever}, {pace:g}, {idle}, {hardware}, {link} | {rate:g} | {gate[threshold]:.4f} | {held_out_rate:.3f} "
        "| {held_out_sent:.3f} | {episodes} | {inferences}",
        rows,
    )


def _comparisons(rows: Sequence[Row]) -> str:
    """Every pair of methods over every link, p in bold where below .05."""
    told = [
        {
            **row, "difference": {key: row[f"success.difference.{key}"] for key in ("mean", "low", "high")},
            "told": f"**{row['p']:.2g}**" if row["p"] < 0.05 else f"{row['p']:.2g}",
        }
        for row in rows
    ]  # fmt: skip
    return table(
        "pace, idle, link | first | second | n | first minus second | p",
        "{pace:g}, {idle}, {link} | {first} | {second} | {episodes} | {difference:+ci3} | {told}",
        told,
    )


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.1f}"


def _interval(cell: Row, name: str, digits: int) -> str:
    return interval_text({key: cell[f"{name}.{key}"] for key in ("mean", "low", "high")}, digits)


def draw_decoded(decoded: Mapping[str, Outcomes]) -> Figure:
    """Success over restricted mean time of every decoding and lever, a panel for each link."""
    links = sorted({link for runs in decoded.values() for _, _, link in runs}, key=_order)
    figure = Figure(figsize=(11.0, 3.8), layout="constrained")
    (panels,) = figure.subplots(1, len(links), sharex=True, sharey=True, squeeze=False)
    for axes, link in zip(panels, links, strict=True):
        for number, runs in enumerate(decoded.values()):
            for (lever, strength, over), run in runs.items():
                if over == link:
                    marker, filled, _ = MARKERS[lever, strength]
                    axes.plot(
                        run["restricted_s"].mean(), run["success"].mean(), marker, color=f"C{number}", markersize=6,
                        markerfacecolor=f"C{number}" if filled else "none",
                    )  # fmt: skip
        axes.set_title(_title(link), fontsize=10, color=INK)
    panels[0].set(ylabel="success", ylim=(0.5, 1.0))
    panels[len(links) // 2].set(xlabel="restricted mean time [s]")
    handles = [Line2D([], [], marker="o", ls="", color=f"C{number}", label=name) for number, name in enumerate(decoded)]
    handles += [
        Line2D([], [], marker=marker, ls="", color=INK, mfc=INK if filled else "none", label=label)
        for marker, filled, label in MARKERS.values()
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), columnspacing=0.9, handletextpad=0.2)
    return figure


def draw_times(sweep: Row, lever: str, pace: float, hardware: str) -> Figure:
    """N, T_chunk, T_task and restricted mean time over a lever's strength, relative to its baseline; sweet spots."""

    def here(rows: Sequence[Row]) -> list[Row]:
        wanted = (lever, pace, hardware)
        return [row for row in rows if (row["lever"], row["pace"], row["hardware"]) == wanted]

    cells, spots = here(sweep["cells"]), {spot["end_point"]: spot for spot in here(sweep["spots"])}
    figure, axes = blank()
    x, strengths = np.arange(len(cells)), [cell["strength"] for cell in cells]
    for name, label, method in (
        ("chunks", "N", "draft"),
        ("chunk_s", "T chunk", "target"),
        ("task_s", "T task", "hybrid"),
    ):
        values, drawn = np.array([cell[name] for cell in cells], np.float64), style_of(method)
        axes.plot(x, values / values[0], color=drawn.colour, marker=drawn.marker, markersize=4, lw=1.4, label=label)
    mean, low, high = (np.array([cell[f"restricted_s.{key}"] for cell in cells]) for key in ("mean", "low", "high"))
    axes.plot(x, mean / mean[0], color=INK, linestyle="--", linewidth=1.2, label="restricted mean time")
    axes.fill_between(x, low / mean[0], high / mean[0], color=INK, alpha=0.08, linewidth=0)
    for end_point, curve in (("task_s", [cell["task_s"] for cell in cells]), ("restricted_s", mean.tolist())):
        at = strengths.index(spots[end_point]["spot.where"])
        axes.plot(at, curve[at] / curve[0], "o", color=MUTED, mfc="none", markersize=11)
    axes.set_xticks(x, [f"{strength:g}" for strength in strengths])
    axes.set(ylabel="over the baseline's", xlabel=f"{lever}, from the baseline to the strongest setting")
    legend_below(figure, columns=2)
    return figure


def draw_frontier(sweep: Row, pace: float, idle: str) -> Figure:
    """Success over the round trip of steady links, a curve per method; dashed what needs no link."""
    figure, axes = blank()
    cells = [(name, cell) for name, cell in _methods(sweep) if (cell["pace"], cell["idle"]) == (pace, idle)]
    for method in FRONTIER:
        drawn, own = style_of(method), [cell for name, cell in cells if name == method]
        for cell in (cell for cell in own if cell["link"] == ON_BOARD):
            axes.axhline(cell["success.mean"], color=drawn.colour, linestyle="--", linewidth=1.4, label=method)
            axes.axhspan(cell["success.low"], cell["success.high"], color=drawn.colour, alpha=0.06, linewidth=0)
        steady = [cell for cell in own if cell["link"].startswith("loopback")]
        if steady:
            steady.sort(key=lambda cell: _rtt(cell["link"]))
            x = [_rtt(cell["link"]) for cell in steady]
            y, low, high = ([cell[f"success.{key}"] for cell in steady] for key in ("mean", "low", "high"))
            axes.plot(x, y, color=drawn.colour, marker=drawn.marker, markersize=4, linewidth=1.4, label=method)
            axes.fill_between(x, low, high, color=drawn.colour, alpha=0.1, linewidth=0)
    # Linear below 1 ms, so that a link without delay has a place.
    axes.set(xlabel="round trip of the link [ms]", ylabel="success", xscale="symlog")
    legend_below(figure)
    return figure
