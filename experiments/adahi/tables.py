"""The study's tables as Markdown, from its stored results by ``BUNDLE-RUN``; missing results are dashes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from experiments.tables import interval_text, markdown, named, optional_text, table
from specact.lab.report.tables import networks_of
from specact.lab.rollout.statistics import holm

# The paper's (kitchen, ball, swarm), human demonstrations (PushT), a hand (relocate), and an arm (Meta-World).
PAIRS = ("ball", "swarm", "kitchen", "pusht", "relocate", "peg")
Summary = Mapping[str, Any]
Study = Mapping[str, Summary]
# A method, and its possible rivals; the first with a contrast is used.
Pair = tuple[str, tuple[str, ...]]

CHANCE = ("random_learned", "random")
# Methods without a rate run only in the table at .6, and are also shown for the other rates.
WITHOUT_RATE = ("draft", "head_draft", "hybrid", "target", "target_on_device")
STORY = {
    "draft": "draft", "head_draft": "head as draft", "distilled": "distilled draft", "random": "random",
    "adahi": "ADAHI", "learned": "learned", "hybrid": "hybrid", "target": "target",
    "target_on_device": "target on device",
}  # fmt: skip
PAPER: dict[str, dict[str, Any]] = {
    "kitchen": {"adahi": 0.394, "hybrid": 0.430, "draft": 0.060, "target": 0.430, "random": 0.325, "sent": 0.543,
                "skips": (0.607, 0.539)},
    "ball": {"adahi": 0.811, "hybrid": 0.834, "draft": 0.001, "target": 0.850, "random": 0.726, "sent": 0.603,
             "skips": (0.553, 0.343)},
    "swarm": {"adahi": 0.294, "hybrid": 0.295, "draft": 0.065, "target": 0.303, "random": 0.230, "sent": 0.591,
              "skips": (0.504, 0.395)},
}  # fmt: skip


def tables_of(study: Study) -> dict[str, str]:
    """Every part of the pages, by name."""
    hours = sum(summary["seconds"] for summary in study.values()) / 3600
    return {
        "overview": overview(study), "costs": costs(study), "sockets": sockets(study), "rates": rates(study),
        "rows": rows(study), "hours": f"{hours:.1f} hours",
    }  # fmt: skip


def overview(study: Study) -> str:
    """One line per pair on its most informative end point: the score, or success."""
    tables = {pair: study[f"{pair}-table"] for pair in PAIRS if f"{pair}-table" in study}
    compared = (("adahi", ("random",)), ("learned", CHANCE), ("learned", ("head_draft",)), ("adahi", ("hybrid",)))
    tests, heads, remark = _tested(list(tables.values()), compared, "score")
    rows = []
    for (pair, summary), cells in zip(tables.items(), tests, strict=True):
        shown = [_score(_story(study, pair, name), summary) for name in STORY]
        rows.append([f"{pair}, {summary['episodes']}", *shown, *cells, _sent(summary, ("adahi", "learned"))])
    return f"{markdown(['pair, episodes', *STORY.values(), *heads, 'sent, ADAHI / learned'], rows)}\n\n{remark}"


def costs(study: Study) -> str:
    """The networks of every pair, and the time per action of each method."""
    rows = []
    for pair in (pair for pair in PAIRS if f"{pair}-table" in study):
        own, distilled = (
            networks_of(methods.values()) for methods in (study[f"{pair}-table"]["methods"], _distilled(study, pair))
        )
        parts = own.get("draft"), own.get("head"), distilled.get("draft"), own.get("target")
        rows.append([pair, *(one or "-" for one in parts), *(_ms(_story(study, pair, name)) for name in STORY)])
    networks = [f"{name}: parameters, ms" for name in ("draft", "head", "distilled draft", "target")]
    return markdown(["pair", *networks, *(f"{name}, ms per action" for name in STORY.values())], rows)


def sockets(study: Study) -> str:
    """Times per action of the study's own networks over real sockets."""
    shown = ("draft", "head_draft", "target_on_device", "target", "hybrid", "random", "adahi", "learned")
    rows = []
    for pair in (pair for pair in PAIRS if f"{pair}-real-time" in study):
        summary = study[f"{pair}-real-time"]
        methods = summary["methods"]
        adahi, hybrid = (methods[name]["latency"]["per_action_ms"] for name in ("adahi", "hybrid"))
        cells = [f"{pair}, {summary['episodes']}", *(_ms(methods.get(name)) for name in shown)]
        rows.append([*cells, f"{adahi / hybrid - 1:+.0%}", _sent(summary, ("adahi",))])
    return markdown(["pair, episodes", *(STORY[name] for name in shown), "ADAHI against hybrid", "sent by ADAHI"], rows)


def rates(study: Study) -> str:
    """Success of every gate at .2, .4 and .6, gate efficiency in brackets, with the trained and the distilled draft."""
    gates = (
        "draft", "head_draft", "head_random", "random", "adahi", "uncertainty", "random_learned", "learned",
        "learned_action", "oracle", "hybrid",
    )  # fmt: skip
    sending = ("random", "adahi", "learned", "learned_action")
    compared: tuple[Pair, ...] = (
        ("learned", CHANCE), ("learned_action", CHANCE), ("learned", ("head_draft",)), ("learned", ("hybrid",)),
        ("uncertainty", ("adahi",)),
    )  # fmt: skip
    found = list(_at_rates(study))
    tests, heads, remark = _tested([summary for _, _, summary in found], compared, "success")
    rows = []
    for (name, constant, summary), contrasts in zip(found, tests, strict=True):
        cells, methods = [name], summary["methods"]
        for gate in gates:
            metrics = methods.get(gate) or (constant.get(gate) if gate in WITHOUT_RATE else None)
            efficiency = (metrics or {}).get("gate_efficiency")
            shown = gate not in WITHOUT_RATE and "random" not in gate and efficiency is not None
            success = "-" if metrics is None else f"{metrics['success']['rate']:.3f}"
            cells.append(f"{success} ({efficiency:.2f})" if shown else success)
        rows.append([*cells, _sent(summary, sending), *contrasts])
    table = markdown(["pair, rate, episodes", *gates, f"sent, {' / '.join(sending)}", *heads], rows)
    return f"{table}\n\n{remark}"


def _at_rates(study: Study) -> Iterator[tuple[str, Summary, Summary]]:
    """Name, the methods of the bundle's table at .6, and the summary."""
    for bundle in (f"{pair}{ending}" for pair in PAIRS for ending in ("", "-distilled")):
        table = study.get(f"{bundle}-table", {"methods": {}})
        runs = [(rate, free, f"rate-{rate}{free}") for rate in ("0.2", "0.4") for free in ("", "-unlimited")]
        for rate, free, run in (*runs, ("0.6", "", "table")):
            summary = study.get(f"{bundle}-{run}")
            if summary is not None and "learned" in summary["methods"]:
                without = ", without ADAHI" if free else ""
                yield f"{bundle}, {rate}{without}, {summary['episodes']}", table["methods"], summary


def rows(study: Study) -> str:
    """The paper's table beside ours: success, rate, true skip ratio."""
    shown = ("adahi", "hybrid", "draft", "target", "random")
    lines = []
    for pair in PAIRS:
        if pair in PAPER:
            paper = PAPER[pair]
            skips = " / ".join(f"{skip:.3f}" for skip in paper["skips"])
            cells = [f"{paper[name]:.3f}" for name in shown]
            lines.append([pair, "paper, success", *cells, f"{paper['sent']:.3f}", skips])
        if f"{pair}-table" not in study:
            continue
        methods = [study[f"{pair}-table"]["methods"][name] for name in shown]
        adahi, random = methods[0], methods[-1]
        skips = f"{adahi['true_skip_ratio']:.3f} / {random['true_skip_ratio']:.3f}"
        success = [f"{m['success']['rate']:.3f}" for m in methods]
        lines.append([pair, "here, success", *success, f"{adahi['transmission_rate']:.3f}", skips])
        for least in adahi.get("success_at", {}):
            cells = [f"{m['success_at'][least]['rate']:.3f}" for m in methods]
            lines.append([pair, f"here, score above {least}", *cells, "", ""])
        if not _binary(study[f"{pair}-table"]):
            lines.append([pair, "here, score", *(f"{m['score']['mean']:.3f}" for m in methods), "", ""])
    heads = ("", "", "ADAHI", "hybrid", "draft", "target", "random", "sent", "true skip, ADAHI / random")
    return markdown(heads, lines)


def whole(name: str, summary: Summary) -> str:
    """One run's methods and contrasts."""
    methods = summary["methods"]
    binary, timed = _binary(summary), "measured over real sockets" if summary["realtime"] else "in virtual time"
    thresholds = list(next(iter(methods.values())).get("success_at", {}))
    about = (
        f"{summary['episodes']} paired episodes, seed {summary['seed']}, gates calibrated for a rate of "
        f"{summary['rate']}, link {summary['link']}, {timed}; {summary['seconds']:.0f} s."
    )
    if networks := networks_of(methods.values()):
        about += f" Parameters and time at batch 1: {'; '.join(map(' '.join, networks.items()))}."
    above = "".join(f" | above {least} [95 %]" for least in thresholds)
    score = "" if binary else " | score [95 %]"
    rows = [
        {
            "mse": None, **row, "accepted": row["acceptance"]["all"], "gate_ms": row.get("cost", {}).get("gate_ms"),
            "ms": row["latency"]["per_action_ms"],
        }
        for row in named(methods)
    ]  # fmt: skip
    whole_table = table(
        f"method | success [95 %]{above}{score} | sent | true skip | accepted | gated loss | action change "
        "| gate efficiency | choice | MSE [95 %] | gate, ms | ms per action",
        "{name} | {success:ci3}"
        + "".join(f" | {{success_at[{least}]:ci3}}" for least in thresholds)
        + (" | {score:ci3}" if score else "")
        + " | {transmission_rate:.3f} | {true_skip_ratio:.3f} | {accepted:.3f} | {gated_loss:.3f} "
        "| {action_change_loss:.3f} | {gate_efficiency:.2f} | {choice_efficiency:.2f} | {mse:ci4} | {gate_ms:.3f} "
        "| {ms:.2f}",
        rows,
    )  # fmt: skip
    parts = [f"### {name}", about, whole_table]
    if summary["contrasts"]:
        pairs: list[Pair] = [(row["first"], (row["second"],)) for row in summary["contrasts"]]
        ends = [_tested([summary], pairs, end_point)[0][0] for end_point in ("success", "score")]
        labels = [f"{first} - {second}" for first, (second,) in pairs]
        tests = [f"{end}: difference [95 %], Holm's p over these" for end in ("success", "score")]
        parts.append(markdown(["contrast", *tests], zip(labels, *ends, strict=True)))
    if summary["calibration"]:
        held = ", ".join(f"{gate} {entry['held_out_rate']:.3f}" for gate, entry in summary["calibration"].items())
        parts.append(f"Held-out transmission rates of the calibrated gates, wanted {summary['rate']}: {held}.")
    return "\n\n".join(parts)


def _tested(
    summaries: Sequence[Summary], pairs: Sequence[Pair], end_point: str
) -> tuple[list[list[str]], list[str], str]:
    """A cell per summary and contrast, their headings, and a remark; p-values are corrected over all these cells."""
    found = [[_contrast(summary, pair, end_point) for pair in pairs] for summary in summaries]
    tested = [one for row in found for one in row if one is not None]
    corrected = iter(holm([one["p"] for one in tested]))
    cells = [
        ["-" if one is None else f"{interval_text(one, 3, '+')}, p = {next(corrected):.2g}" for one in row]
        for row in found
    ]
    heads = [f"{first} - {' or '.join(seconds)}" for first, seconds in pairs]
    return cells, heads, f"p after Holm's correction over the {len(tested)} contrasts of this table."


def _contrast(summary: Summary, pair: Pair, end_point: str) -> dict[str, Any] | None:
    first, seconds = pair
    rows = {row["second"]: row[end_point] for row in summary["contrasts"] if row["first"] == first}
    return next((rows[second] for second in seconds if second in rows), None)


def _distilled(study: Study, pair: str) -> dict[str, Any]:
    """The methods of the longest run with the distilled draft alone."""
    names = [f"{pair}-distilled-{run}" for run in ("table", "rate-0.4")]
    runs = [study[name] for name in names if name in study]
    found: dict[str, Any] = max(runs, key=lambda run: int(run["episodes"]), default={"methods": {}})["methods"]
    return found


def _story(study: Study, pair: str, name: str) -> dict[str, Any] | None:
    """The metrics of a method of the overview; the distilled draft alone is the draft of another bundle."""
    if name == "distilled":
        return _distilled(study, pair).get("draft")
    found: dict[str, Any] | None = study[f"{pair}-table"]["methods"].get(name)
    return found


def _score(metrics: dict[str, Any] | None, summary: Summary) -> str:
    if metrics is None:
        return "-"
    n = metrics["success"]["n"]
    return interval_text(metrics["score"]) + ("" if n == summary["episodes"] else f", {n} episodes")


def _sent(summary: Summary, names: Sequence[str]) -> str:
    methods = summary["methods"]
    return " / ".join(optional_text(methods.get(name, {}).get("transmission_rate"), 2) for name in names)


def _ms(metrics: dict[str, Any] | None) -> str:
    return "-" if metrics is None else f"{metrics['latency']['per_action_ms']:.2f}"


def _binary(summary: Summary) -> bool:
    return all(m["score"]["mean"] == m["success"]["rate"] for m in summary["methods"].values())
