"""The study's tables as Markdown, from the summaries of its runs by ``PAIR-RUN``; missing results are dashes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from specact.lab.evaluation.study import PAIRS

from specact.lab.report.networks import all_networks
from specact.lab.statistics import holm

Summary = dict[str, Any]
Metrics = dict[str, Any]
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


def overview(study: dict[str, Summary]) -> str:
    """One line per pair on its most informative end point: the score, or success."""
    pairs = [pair for pair in PAIRS if f"{pair}-table" in study]
    tables = [study[f"{pair}-table"] for pair in pairs]
    compared: tuple[Pair, ...] = (
        ("adahi", ("random",)), ("learned", CHANCE), ("learned", ("head_draft",)), ("adahi", ("hybrid",)),
    )  # fmt: skip
    tests, heads, remark = _tested(tables, compared, "score")
    rows = []
    for pair, summary, cells in zip(pairs, tables, tests, strict=True):
        shown = [_score(_story(study, pair, name), summary) for name in STORY]
        sent = " / ".join(
            _number(summary["methods"].get(m, {}).get("transmission_rate"), 2) for m in ("adahi", "learned")
        )
        rows.append([f"{pair}, {summary['episodes']}", *shown, *cells, sent])
    return _table(["pair, episodes", *STORY.values(), *heads, "sent, ADAHI / learned"], rows) + f"\n\n{remark}"


def costs(study: dict[str, Summary]) -> str:
    """The networks of every pair, and the time per action of each method."""
    rows = []
    for pair in (pair for pair in PAIRS if f"{pair}-table" in study):
        methods = study[f"{pair}-table"]["methods"]
        own = {network.name: network for network in all_networks(methods.values())}
        distilled = {network.name: network for network in all_networks(_distilled(study, pair).values())}
        networks = [_network(own.get(name)) for name in ("draft", "head", "target")]
        networks.insert(2, _network(distilled.get("draft")))
        times = [_story(study, pair, name) for name in STORY]
        rows.append([pair, *networks, *(_ms(metrics) for metrics in times)])
    networks = [f"{name}: parameters, ms" for name in ("draft", "head", "distilled draft", "target")]
    return _table(["pair", *networks, *(f"{name}, ms per action" for name in STORY.values())], rows)


def sockets(study: dict[str, Summary]) -> str:
    """Times per action of the study's own networks over real sockets."""
    shown = ("draft", "head_draft", "target_on_device", "target", "hybrid", "random", "adahi", "learned")
    rows = []
    for pair in (pair for pair in PAIRS if f"{pair}-real-time" in study):
        summary = study[f"{pair}-real-time"]
        methods = summary["methods"]
        adahi, hybrid = (methods[name]["latency"]["per_action_ms"] for name in ("adahi", "hybrid"))
        sent = f"{methods['adahi']['transmission_rate']:.2f}"
        cells = [f"{pair}, {summary['episodes']}", *(_ms(methods.get(name)) for name in shown)]
        rows.append([*cells, f"{adahi / hybrid - 1:+.0%}", sent])
    names = [STORY[name] for name in shown]
    return _table(["pair, episodes", *names, "ADAHI against hybrid", "sent by ADAHI"], rows)


def rates(study: dict[str, Summary]) -> str:
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
            if metrics is None:
                cells.append("-")
                continue
            efficiency = metrics.get("gate_efficiency")
            shown = gate not in WITHOUT_RATE and "random" not in gate and efficiency is not None
            cells.append(f"{metrics['success']['rate']:.3f}" + (f" ({efficiency:.2f})" if shown else ""))
        cells.append(" / ".join(_number(methods.get(name, {}).get("transmission_rate"), 2) for name in sending))
        rows.append([*cells, *contrasts])
    table = _table(["pair, rate, episodes", *gates, f"sent, {' / '.join(sending)}", *heads], rows)
    return f"{table}\n\n{remark}"


def _at_rates(study: dict[str, Summary]) -> Iterator[tuple[str, dict[str, Metrics], Summary]]:
    """Name, the methods of the bundle's table at .6, and the summary."""
    for pair in PAIRS:
        for bundle in (pair, f"{pair}-distilled"):
            table = study.get(f"{bundle}-table", {"methods": {}})["methods"]
            for rate in ("0.2", "0.4", "0.6"):
                endings = ("",) if rate == "0.6" else ("", "-unlimited")
                for ending in endings:
                    summary = study.get(f"{bundle}-table" if rate == "0.6" else f"{bundle}-rate-{rate}{ending}")
                    if summary is not None and "learned" in summary["methods"]:
                        free = ", without ADAHI" if ending else ""
                        yield f"{bundle}, {rate}{free}, {summary['episodes']}", table, summary


def rows(study: dict[str, Summary]) -> str:
    """The paper's table beside ours: success, rate, true skip ratio."""
    shown = ("adahi", "hybrid", "draft", "target", "random")
    lines = []
    for pair in PAIRS:
        if pair in PAPER:
            paper = PAPER[pair]
            cells = [f"{paper[name]:.3f}" for name in shown]
            skips = " / ".join(f"{skip:.3f}" for skip in paper["skips"])
            lines.append([pair, "paper, success", *cells, f"{paper['sent']:.3f}", skips])
        summary = study.get(f"{pair}-table")
        if summary is None:
            continue
        methods = {name: summary["methods"][name] for name in shown}
        cells = [f"{m['success']['rate']:.3f}" for m in methods.values()]
        skips = " / ".join(f"{methods[name]['true_skip_ratio']:.3f}" for name in ("adahi", "random"))
        lines.append([pair, "here, success", *cells, f"{methods['adahi']['transmission_rate']:.3f}", skips])
        for least in methods["adahi"].get("success_at", {}):
            cells = [f"{m['success_at'][least]['rate']:.3f}" for m in methods.values()]
            lines.append([pair, f"here, score above {least}", *cells, "", ""])
        if not _binary(summary):
            cells = [f"{m['score']['mean']:.3f}" for m in methods.values()]
            lines.append([pair, "here, score", *cells, "", ""])
    return _table(["", "", "ADAHI", "hybrid", "draft", "target", "random", "sent", "true skip, ADAHI / random"], lines)


def whole(name: str, summary: Summary) -> str:
    """One run's methods and contrasts."""
    methods = summary["methods"]
    binary, timed = _binary(summary), "measured over real sockets" if summary["realtime"] else "in virtual time"
    thresholds = list(next(iter(methods.values())).get("success_at", {}))
    lines = [
        f"### {name}",
        "",
        f"{summary['episodes']} paired episodes, seed {summary['seed']}, gates calibrated for a rate of "
        f"{summary['rate']}, link {summary['link']}, {timed}; {summary['seconds']:.0f} s.",
    ]
    networks = all_networks(methods.values())
    if networks:
        lines[-1] += f" Parameters and time at batch 1: {'; '.join(map(str, networks))}."
    heads = ["method", "success [95 %]", *(f"above {least} [95 %]" for least in thresholds)]
    heads += [] if binary else ["score [95 %]"]
    heads += ["sent", "true skip", "accepted", "gated loss", "action change", "gate efficiency", "choice"]
    heads += ["MSE [95 %]", "gate, ms", "ms per action"]
    rows = []
    for method, m in methods.items():
        cells = [method, _share(m["success"]), *(_share(m["success_at"][least]) for least in thresholds)]
        cells += [] if binary else [_interval(m["score"], 3)]
        rows.append([
            *cells,
            f"{m['transmission_rate']:.3f}",
            _number(m["true_skip_ratio"]),
            _number(m["acceptance"]["all"]),
            _number(m["gated_loss"]),
            _number(m["action_change_loss"]),
            _number(m["gate_efficiency"], 2),
            _number(m["choice_efficiency"], 2),
            _interval(m["mse"], 4) if m.get("mse") else "-",
            _number(m.get("cost", {}).get("gate_ms")),
            f"{m['latency']['per_action_ms']:.2f}",
        ])  # fmt: skip
    lines += ["", _table(heads, rows)]
    if summary["contrasts"]:
        pairs: list[Pair] = [(row["first"], (row["second"],)) for row in summary["contrasts"]]
        ends = [_tested([summary], pairs, end_point)[0][0] for end_point in ("success", "score")]
        named = [f"{first} - {second}" for first, (second,) in pairs]
        head = [f"{end}: difference [95 %], Holm's p over these" for end in ("success", "score")]
        lines += ["", _table(["contrast", *head], [list(row) for row in zip(named, *ends, strict=True)])]
    if summary["calibration"]:
        held = ", ".join(f"{gate} {entry['held_out_rate']:.3f}" for gate, entry in summary["calibration"].items())
        lines += ["", f"Held-out transmission rates of the calibrated gates, wanted {summary['rate']}: {held}."]
    return "\n".join(lines)


def _tested(
    summaries: Sequence[Summary], pairs: Sequence[Pair], end_point: str
) -> tuple[list[list[str]], list[str], str]:
    """A cell per summary and contrast, their headings, and a remark; p-values are corrected over all these cells."""
    found = [[_contrast(summary, pair, end_point) for pair in pairs] for summary in summaries]
    tested = [one for row in found for one in row if one is not None]
    corrected = iter(holm([one["p"] for one in tested]))
    cells = [
        [
            "-" if one is None else
            f"{one['difference']:+.3f} [{one['low']:+.3f}, {one['high']:+.3f}], p = {next(corrected):.2g}"
            for one in row
        ]
        for row in found
    ]  # fmt: skip
    heads = [f"{first} - {' or '.join(seconds)}" for first, seconds in pairs]
    return cells, heads, f"p after Holm's correction over the {len(tested)} contrasts of this table."


def _contrast(summary: Summary, pair: Pair, end_point: str) -> Metrics | None:
    first, seconds = pair
    rows = {row["second"]: row[end_point] for row in summary["contrasts"] if row["first"] == first}
    return next((rows[second] for second in seconds if second in rows), None)


def _distilled(study: dict[str, Summary], pair: str) -> dict[str, Metrics]:
    """The methods of the longest run with the distilled draft alone."""
    runs = [
        study[f"{pair}-distilled-{chapter}"]
        for chapter in ("table", "rate-0.4")
        if f"{pair}-distilled-{chapter}" in study
    ]
    return max(runs, key=lambda run: int(run["episodes"]), default={"methods": {}})["methods"]


def _story(study: dict[str, Summary], pair: str, name: str) -> Metrics | None:
    """The metrics of a method of the overview; the distilled draft alone is the draft of another bundle."""
    if name == "distilled":
        return _distilled(study, pair).get("draft")
    found: Metrics | None = study[f"{pair}-table"]["methods"].get(name)
    return found


def _score(metrics: Metrics | None, summary: Summary) -> str:
    if metrics is None:
        return "-"
    n = metrics["success"]["n"]
    return _interval(metrics["score"], 2) + ("" if n == summary["episodes"] else f", {n} episodes")


def _network(network: object) -> str:
    return "-" if network is None else str(network).split(" ", 1)[1]


def _ms(metrics: Metrics | None) -> str:
    return "-" if metrics is None else f"{metrics['latency']['per_action_ms']:.2f}"


def _binary(summary: Summary) -> bool:
    return all(m["score"]["mean"] == m["success"]["rate"] for m in summary["methods"].values())


def _share(found: Metrics) -> str:
    return f"{found['rate']:.3f} [{found['low']:.3f}, {found['high']:.3f}]"


def _interval(found: Metrics, digits: int) -> str:
    return f"{found['mean']:.{digits}f} [{found['low']:.{digits}f}, {found['high']:.{digits}f}]"


def _number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
