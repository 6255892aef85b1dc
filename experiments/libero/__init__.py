"""LIBERO on the benchmark's initial states: does a policy look and read, and what do steps, drafts and gates save?

Ten simulators live in a process, 6 GB: give ``--workers 1``.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.figures import draw_series, points_of
from experiments.flash import METHODS as FLOW
from experiments.flash import cost_of, measure_rounds
from experiments.grid import UNTIMED, Cell, Experiment, Results, Run, evaluated, made_pair, specact
from experiments.measure import outcomes
from experiments.report import Picture, Report, Table, contrast_table, filled, one_family
from experiments.tokens import costs, relative_time
from experiments.tokens.gain import measure_gain
from experiments.tokens.methods import METHODS as TOKENS
from specact.bundle.bundle import named_bundles
from specact.lab.data.episodes import Episodes
from specact.lab.data.generate import demonstrate
from specact.lab.envs import evaluated as evaluated_in
from specact.lab.envs import load_task
from specact.lab.evaluation.run import Evaluation, read_table
from specact.lab.rollout.methods import Method
from specact.lab.rollout.statistics import contrast, mean_interval, seeds_interval, wilson
from specact.lab.tised.sweep import load_hardware
from specact.load import load_pair
from specact.systems.flow import FLASH as BLOCK

SPATIAL, OBJECT, WORLDS = "libero-spatial", "libero-object", "experiments.libero.worlds"
SWAP, ALONE, EXPERT = "libero-spatial-swap", "target_on_device", "expert"
# Ten episodes of each task; fewer with grey frames of Object, other words or many decodings. A shard has one of each.
EPISODES, FEWER, FEW, SHARD = range(100), range(50), range(20), 10
TICK_S = 0.05
# Euler steps by row; and the profiles of hardware with the times that TISED has for pi0.5.
STEPS = {"full": 10, "full_2": 2, "full_1": 1}
PI05 = {"RTX 4070": "pi05-rtx-4070", "AGX 30 W": "pi05-agx-30w"}
# The policy of rows with fewer bits.
QUANTISED = {"w8a8": f"{WORLDS}:W8A8", "w4a8": f"{WORLDS}:W4A8"}
# Methods of FLASH's block and their controls; and drafters of a token policy.
CHECKED = ("flash", "flash_fitted", "flash_last", "unchecked", "block")
DECODINGS = ("ar", "specvla", "last", "kerv", "kerv_fixed", "heisd_fixed", "last_fixed")
# A row of a policy: methods, environment, episodes. The most informative rows come first.
Row = tuple[tuple[str | Method, ...], str, range]


def flow_rows(suite: str, *names: str) -> dict[str, Row]:
    """Rows of a flow policy on a suite, each with its number of steps."""
    return {name: ((FLOW[name],), suite, EPISODES) for name in names}


POLICIES: dict[str, dict[str, Row]] = {
    "libero-spatial-flow": {
        **flow_rows(SPATIAL, "full", "full_1"),
        "blank": ((FLOW["full"],), f"{WORLDS}:BLANK", EPISODES),
        "other_words": ((FLOW["full"],), f"{WORLDS}:SHUFFLED", FEW),
        "exact": ((FLOW["full"],), f"{WORLDS}:EXACT", EPISODES),
        **flow_rows(SPATIAL, "full_2"),
        "w8a8": ((FLOW["full"],), SPATIAL, FEWER),
        "w4a8": ((FLOW["full"],), SPATIAL, FEWER),
        "checked": (tuple(FLOW[name] for name in CHECKED), SPATIAL, FEWER),
    },
    # Trained on the same demonstrations: with cameras, with three seeds, and without cameras.
    "libero-spatial-flow-60": {**flow_rows(SPATIAL, "full"), "swap": ((FLOW["full"],), SWAP, EPISODES)},
    **{f"libero-spatial-flow-60-{seed}": flow_rows(SPATIAL, "full") for seed in (1, 2)},
    "libero-spatial-state": flow_rows(SPATIAL, "full"),
    "libero-spatial-draft": {"alone": ((ALONE,), SPATIAL, EPISODES)},
    "libero-spatial-tokens": {
        "alone": ((ALONE,), SPATIAL, EPISODES),
        "decodings": (tuple(TOKENS[name] for name in DECODINGS), SPATIAL, FEW),
    },
    "libero-spatial-tokens-small": {"alone": ((ALONE,), SPATIAL, EPISODES)},
    "libero-spatial": {},
    "libero-object-flow": {
        **flow_rows(OBJECT, "full", "full_1", "full_2"),
        "blank": ((FLOW["full"],), f"{WORLDS}:BLANK_OBJECT", FEWER),
        "other_words": ((FLOW["full"],), f"{WORLDS}:SHUFFLED_OBJECT", FEW),
    },
    "libero-object-draft": {"alone": ((ALONE,), OBJECT, EPISODES)},
    # The scripted expert, which knows where everything stands: can it be done at all?
    EXPERT: {"spatial": ((), SPATIAL, FEW), "swap": ((), SWAP, FEW), "object": ((), OBJECT, FEW)},
}  # fmt: skip
# For each target its draft, None for a pair of action codes, and the episodes of its gates.
PAIRS = {"libero-spatial": (None, FEWER), "libero-spatial-flow": ("libero-spatial-draft", EPISODES)}
# Some rows of a policy go on with some of their methods, up to so many episodes, in cells of their own.
LONGER, MORE, ALL = "libero-spatial-flow", "-more", 200
GOES_ON: dict[str, tuple[str | Method, ...]] = {
    "gates-0.4": (ALONE, "draft", "random", "adahi"), "gates-0.2": ("random", "adahi"),
    "full": (FLOW["full"],), "full_1": (FLOW["full_1"],),
    "checked": tuple(FLOW[name] for name in ("flash", "flash_fitted", "block")),
}  # fmt: skip
# Methods of the picture, by the method of other pictures whose colour they have.
SHOWN = {
    "draft": "draft", "random": "random", "adahi": "adahi", "learned": "learned", "hybrid": "hybrid",
    "target": "full", "target_on_device": "full_1",
}  # fmt: skip
# Trainings of one recipe; and what is kept of a method besides outcomes.
SEEDS = ("libero-spatial-flow-60", "libero-spatial-flow-60-1", "libero-spatial-flow-60-2")
KEPT = ("tasks", "inferences", "sent", "accepted", "passes", "full", "failed", "actions_per_round")
# Methods of a pair that no rate changes; cells of gates at a rate; inferences that a learned one is trained on, twice.
UNRATED, RATES, CALIBRATED, LESSONS = (ALONE, "draft", "hybrid"), (0.4, 0.2), 20, 1000
# Episodes of the target's path on which decodings are timed.
ON_PATH = 20
BEHIND_DRAFT = ("draft", "random", "adahi", "learned", "hybrid")
# Inferences within which most episodes that succeed have ended.
USUAL = 8


class Asking(NamedTuple):
    """Methods that ask at a rate, and after ``limit`` skips in a row, if that is not 0, whatever the score."""

    rate: float
    methods: tuple[str, ...]
    limit: int = 0


GATES = {f"gates-{rate}": Asking(rate, (ALONE, "draft", "random", "adahi", "hybrid")) for rate in RATES}
GATES |= {f"learned-{rate}": Asking(rate, ("learned",)) for rate in RATES}
# The limit was chosen on the hundred episodes after those it is judged on.
GATES["skips-0.4"] = Asking(0.4, ("random", "adahi"), 3)


def plan(run: Run) -> Iterator[Cell]:
    """The cells of every installed policy: its rows, its gates, and times of fewer steps and of checked rounds."""
    bundles = {**named_bundles(), EXPERT: Path()}
    for policy in (name for name in POLICIES if name in bundles):
        rows, checked = POLICIES[policy], (bundles[policy] / BLOCK).exists()
        for name in (name for name in rows if checked or name != "checked"):
            yield Cell(f"{policy}/{name}", partial(measure, QUANTISED.get(name, policy), rows[name]))
        for name, gates in GATES.items() if policy in PAIRS else ():
            yield Cell(f"{policy}/{name}", partial(gated, policy, (gates.methods, SPATIAL, PAIRS[policy][1]), gates))
        for name, going_on in GOES_ON.items() if policy == LONGER else ():
            done = rows[name][2] if name in rows else PAIRS[policy][1]
            row = going_on, SPATIAL, range(done.stop, ALL)
            work = partial(measure, policy, row) if name in rows else partial(gated, policy, row, GATES[name])
            yield Cell(f"{policy}/{name}{MORE}", work)
        if "full_1" in rows:
            yield Cell(f"{policy}/times", partial(times, policy))
        if "decodings" in rows:
            yield Cell(f"{policy}/gain", partial(gain, policy))
        if checked:
            yield Cell(f"{policy}/rounds", partial(measure_rounds, policy, 4))


def measure(policy: str, row: Row, folder: Path, run: Run) -> dict[str, Any]:
    """Success and control steps of every episode, by method."""
    methods, env, episodes = row
    if policy == EXPERT:
        return {EXPERT: demonstrated(env, run.few(len(episodes)), run.seed)}
    # Both parts of a pair are the policy, so that it can be evaluated without another one.
    bundle = made_pair(folder / "pair", policy, policy, env=env) if ALONE in methods else policy
    return succeeded(Evaluation(bundle, env, methods, len(episodes), first=episodes.start), folder, run)


def demonstrated(env: str, episodes: int, seed: int) -> dict[str, Any]:
    """Success and control steps of the scripted expert, undisturbed."""
    task, rows = load_task(evaluated_in(env)), list[Episodes | None]()
    world = task.make(render_mode=None)
    for episode in range(episodes):
        rows.append(demonstrate(task, world, np.random.default_rng([seed, episode]), 0.0, episode))
    world.close()
    steps = [task.max_steps if row is None else row.steps for row in rows]
    return {"won": [int(row is not None) for row in rows], "steps": steps, "tasks": {}, "inferences": sum(steps)}


def gated(policy: str, row: Row, gates: Asking, folder: Path, run: Run) -> dict[str, Any]:
    """The policy behind its draft; gates are calibrated on drawn states."""
    pair, (draft, _), (methods, env, episodes) = policy, PAIRS[policy], row
    if draft is not None:
        pair = made_pair(folder / "pair", draft, policy, env=SPATIAL)
    if "learned" in methods:
        lessons, few = run.few(LESSONS), run.few(CALIBRATED)
        specact("calibrate", pair, "--gate", "learned", "--rate", gates.rate, "--lessons", lessons,
                "--episodes", few, "--workers", 1, "--seed", run.seed)  # fmt: skip
    options = (f"max_skips={gates.limit}",) if gates.limit else ()
    what = Evaluation(pair, env, methods, len(episodes), rate=gates.rate, gate_options=options)
    return succeeded(replace(what, first=episodes.start, calibration_episodes=CALIBRATED), folder, run)


def succeeded(evaluation: Evaluation, folder: Path, run: Run) -> dict[str, Any]:
    """What is kept of an evaluation, by method."""
    summary = evaluated(replace(evaluation, seed=run.seed, shard=SHARD, **UNTIMED), folder, run)
    return {
        name: {
            "won": [int(value) for value in outcomes(folder, name)],
            "stuck": stuck(read_table(folder / "steps" / name), outcomes(folder, name)),
            "steps": [int(value) for value in outcomes(folder, name, "steps")],
            **{key: metrics[key] for key in KEPT if key in metrics},
        }
        for name, metrics in summary["methods"].items()
    }


def stuck(steps: Mapping[str, np.ndarray], won: np.ndarray) -> float | None:
    """The share of inferences that ask, of those after :data:`USUAL` in episodes that were lost; None without any."""
    late = steps["transmitted"][(steps["step"] >= USUAL) & (won[steps["episode"] - steps["episode"].min()] == 0)]
    return float(late.mean()) if late.size else None


def times(policy: str, folder: Path, run: Run) -> dict[str, dict[str, float]]:
    """Times of fewer steps and of the draft over those of ten steps; they alternate, so that load falls on all."""
    others = {f"{steps} steps" if steps > 1 else "1 step": (policy, steps) for steps in (5, 2, 1)}
    draft, _ = PAIRS.get(policy, (None, EPISODES))
    if draft is not None:
        others["draft"] = draft, 1
    measured = costs(policy, others)
    return {"10 steps": measured.pop("ar"), **measured}


def gain(policy: str, folder: Path, run: Run) -> dict[str, Any]:
    """Time and passes of decodings on the target's own path."""
    return measure_gain(load_pair(policy), DECODINGS, run.few(ON_PATH), run.seed)


def joined(first: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """What is kept of a method's first episodes and of more, as of all; shares and means are per inference."""
    count = first["inferences"] + more["inferences"]
    total: dict[str, Any] = {
        name: (value * first["inferences"] + more[name] * more["inferences"]) / count
        for name, value in first.items() if isinstance(value, float) and name != "stuck"
    }  # fmt: skip
    total |= {name: first[name] + more[name] for name in ("won", "steps")} | {"inferences": count, "tasks": {}}
    for task, row in first["tasks"].items():
        k, n = (row[key] + more["tasks"][task][key] for key in ("k", "n"))
        total["tasks"][task] = {"k": k, "n": n, **asdict(wilson(k, n)), "rate": k / n}
    return total


def rows_of(results: Results) -> Iterator[dict[str, Any]]:
    """A row for every method of every cell that is there."""
    for policy, rows in POLICIES.items():
        cells, labels = results.get(policy, {}), set[str]()
        for name in (*rows, *GATES):
            more = cells.get(name + MORE, {})
            for method, cell in cells.get(name, {}).items():
                label = name if len(cells[name]) == 1 else method
                if name in GATES:
                    asks = f"{GATES[name].rate}{', limit' * bool(GATES[name].limit)}"
                    label = method if method in UNRATED else f"{method} {asks}"
                if label in labels:
                    continue
                labels.add(label)
                late = more.get(method, cell).get("stuck")
                total = joined(cell, more[method]) if method in more else cell
                won, steps = np.array(total["won"], float), np.array(total["steps"], float)
                counts = {**total, "actions_per_round": steps.sum() / total["inferences"]}
                yield {
                    "policy": policy, "name": label, "episodes": len(won), "won": won, "steps": steps,
                    "success": asdict(wilson(int(won.sum()), len(won))),
                    "chunks": total["inferences"] / len(won), "actions": counts["actions_per_round"],
                    "tasks": total["tasks"], "sent": total["sent"] if name in GATES else None,
                    "stuck": late, "passes": total.get("passes"),
                    "ms": milliseconds(method if name in GATES else label, counts, cells),
                }  # fmt: skip


def milliseconds(method: str, counts: Mapping[str, Any], cells: Mapping[str, Any]) -> float | None:
    """Processor time for an executed action, of a draft with its target's, where rounds or decodings are timed.

    Of the policy as it is: what a world or fewer bits change is not timed.
    """
    costs, others, decodings = cells.get("rounds", {}).get("costs"), cells.get("times", {}), cells.get("gain", {})
    if method in decodings:
        greedy = cells["decodings"]["ar"]
        action = decodings["ar"]["ms"] * greedy["inferences"] / sum(greedy["steps"])
        return float(action * relative_time(decodings[method], counts)["relative"])
    if costs and method in FLOW:
        rounds: Any = FLOW[method].composition
        return cost_of(rounds, {"full": 1.0, "failed": 0.0, **counts}, costs)
    if costs and "draft" in others and method in BEHIND_DRAFT:
        spent = others["draft"]["relative"] + counts["sent"]
        return float(spent * costs["full_10"]["ms"] / counts["actions_per_round"])
    return None


# The rivals of a row, by its name, or by its policy and its name; any other row has the first one of its policy.
RIVALS: dict[str, tuple[str, ...]] = {
    **{f"{EXPERT} {name}": () for name in POLICIES[EXPERT]},
    "libero-spatial-state full": ("libero-spatial-flow-60 full",),
    "libero-spatial-tokens-small alone": ("libero-spatial-tokens alone",),
    **{f"{gate} {rate}": ("draft", f"random {rate}") for rate in RATES for gate in ("adahi", "learned", "random")},
    "adahi 0.4, limit": ("random 0.4, limit", "random 0.4", "adahi 0.4", "draft"),
    "random 0.4, limit": ("random 0.4",),
    **dict.fromkeys(("flash", "flash_fitted"), ("full", "full_1", "unchecked", "block")),
    "block": ("full", "full_1"), "hybrid": (),
    "specvla": ("ar", "last", "libero-spatial-tokens-small alone"), "kerv": ("ar", "kerv_fixed"),
    "heisd_fixed": ("ar", "last_fixed"),
}  # fmt: skip


def contrasts_of(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Each method against its rivals, on the episodes that both ran."""
    tests, by_name = [], {f"{row['policy']} {row['name']}": row for row in rows}
    firsts = {row["policy"]: row["name"] for row in reversed(rows)}
    for row in rows:
        policy, name = row["policy"], row["name"]
        for rival in RIVALS.get(f"{policy} {name}", RIVALS.get(name, (firsts[policy],))):
            other = by_name.get(f"{policy} {rival}", by_name.get(rival))
            if other is not None and other is not row:
                count = min(row["episodes"], other["episodes"])
                test = contrast(row["won"][:count], other["won"][:count])
                tests.append({"on": policy, "measure": "success", "first": name, "second": rival, **asdict(test)})
    return one_family(tests)


def pooled(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Success over trainings of one recipe, with an interval over trainings and episodes."""
    won = [row["won"] for row in rows if row["policy"] in SEEDS and row["name"] == "full"]
    success = asdict(seeds_interval(won))
    return {"policy": SEEDS[0], "trainings": len(won), "episodes": len(won[0]), "success": success}


def task_times(rows: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """TISED's task time, failures at the limit counted: the world waits for every chunk; paired with ten steps."""
    for policy in dict.fromkeys(row["policy"] for row in rows):
        by_name = {row["name"]: row for row in rows if row["policy"] == policy and row["name"] in STEPS}
        for name, row in by_name.items() if {"full", "full_1"} <= by_name.keys() else ():
            both = slice(min(row["episodes"], by_name["full"]["episodes"]))
            steps = {kind: by_name[kind]["steps"][both] for kind in (name, "full")}
            chunks = {kind: np.ceil(counts / 16) for kind, counts in steps.items()}
            won = (row["won"][both] * by_name["full"]["won"][both]).astype(bool)
            for hardware, profile in PI05.items():
                _, latency = load_hardware(profile)
                assert latency.base_ms is not None, "it has absolute times"
                took = {kind: 1e-3 * (latency.base_ms + latency.step_ms * count) for kind, count in STEPS.items()}
                spent = {kind: chunks[kind] * took[kind] + steps[kind] * TICK_S for kind in steps}
                yield {
                    "policy": policy, "steps": STEPS[name], "hardware": hardware,
                    "chunks": asdict(mean_interval(chunks[name])), "task": asdict(mean_interval(spent[name])),
                    "chunk_s": took[name] + 16 * TICK_S,
                    "more": asdict(mean_interval(chunks[name] / chunks["full"])),
                    "over": asdict(mean_interval(spent[name] / spent["full"])),
                    "both": asdict(mean_interval((spent[name] / spent["full"])[won])) if won.sum() > 1 else None,
                }  # fmt: skip


def report(results: Results) -> Report:
    """Success of what is measured, per task, the task's time over steps, and the papers' claims beside it."""
    rows = list(rows_of(results))
    tests, spent, seeds = contrasts_of(rows), list(task_times(rows)), pooled(rows)
    per_task = [
        {"policy": row["policy"], "name": row["name"], "task": task.replace("_", " "), "success": success}
        for row in rows for task, success in sorted(row["tasks"].items())
    ]  # fmt: skip
    measured = [{"policy": policy, "steps": name, "time": time}
                for policy in POLICIES for name, time in results.get(policy, {}).get("times", {}).items()]  # fmt: skip
    named = [(f"{row['policy']} {row['name']}", row) for row in rows]
    named += [(f"{row['on']} {row['first']}_{row['second']}", row) for row in tests]
    facts: dict[str, Any] = {name.removeprefix("libero-").replace(".", ""): row for name, row in named}
    split = Experiment.load("split").stored()["virtual"]["libero-spatial-tokens"]["20"]
    facts["split"] = {
        f"{row['link']} {row['method']}": row["speedup"]["device"] for link in split.values() for row in link
    }
    delayed = Experiment.load("delay").stored()["libero"]
    facts["delayed"] = {f"{name} {d}": cell["success"] for name, at in delayed.items() for d, cell in at.items()}
    facts |= {"time": results[LONGER]["times"], "decoded": results["libero-spatial-tokens"]["gain"], "trainings": seeds}
    for row in spent:
        if row["policy"] == LONGER:
            facts[f"chunks_{row['steps']}"] = row["more"]
            facts[f"task_{row['hardware'][:3]}_{row['steps']}"] = row["over"]
    published = tomllib.loads(Path(__file__).with_name("published.toml").read_text())["claim"]
    tables = [
        Table(
            "success", "Success on the benchmark's initial states, as many episodes of each of the ten tasks, paired; "
            "processor time for an executed action, of a draft with its target's.",
            "policy | method | episodes | success | actions per inference | asked | passes | ms",
            "{policy} | `{name}` | {episodes} | {success:ci2} | {actions:.1f} | {sent:.2f?} | {passes:.1f?} "
            "| {ms:.2f?}",
            [{key: value for key, value in row.items() if key not in ("won", "steps", "tasks")} for row in rows],
        ),
        Table("trainings", "Trainings of one recipe that differ in their seed; interval over trainings and episodes.",
              "policy | trainings | episodes of each | success",
              "{policy} | {trainings} | {episodes} | {success:ci2}", [seeds]),
        Table("tasks", "Success by task.", rows=per_task),
        Table("times", "Time of an inference over that in ten steps, alternating on one core.",
              "policy | steps | of ten steps", "{policy} | {steps} | {time:ci2}", measured),
        Table(
            "task-time", "Time of a task where the world waits for every chunk, with the latencies that TISED has for "
            "pi0.5; failures count with the time of the limit. Ratios to ten steps are paired; the last one is over "
            "episodes in which both succeed.",
            "policy | hardware | steps | chunk [s] | chunks | task [s] | of ten steps' | both succeed",
            "{policy} | {hardware} | {steps} | {chunk_s:.2f} | {chunks:ci1} | {task:ci1} | {over:ci2} | {both:ci2}",
            spent,
        ),
        Table("claims", "Papers' claims on LIBERO beside ours.", "paper | claim | model | data | hardware | here",
              "{paper} | {claim} | {model} | {data} | {hardware} | {ours}",
              [{**claim, "ours": filled(claim["ours"], facts)} for claim in published]),
        contrast_table(tests, family="success, every method against its control, or the first one of its policy"),
    ]  # fmt: skip
    longer = [row for row in rows if row["policy"] == LONGER]
    drawn = {
        style: points_of({row["sent"] or 0.0: row["success"] for row in longer if row["name"].split(" ")[0] == name})
        for style, name in SHOWN.items()
    }
    labels = SHOWN | {"target": "ten steps, no draft", "target_on_device": "one step, no draft"}
    picture = partial(draw_series, drawn, "share of inferences that ask", "success", "LIBERO-Spatial", labels)
    return Report(tables, facts, [Picture("libero.svg", picture)])
