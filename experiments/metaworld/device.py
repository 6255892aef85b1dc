"""Success in real time: policies on devices of different speed, and a server behind real sockets.

A simulated robot whose world does not wait (``specact run --live``), a device that has a share of one core
(``--device-share``), the pair's target on a server in a process of its own, and a link between them. Nothing of the
world, the server or the link counts against the device.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from experiments.grid import Cell, Run, made_pair, specact
from experiments.measure import from_digits, paired, to_digits
from specact.files import file_stem
from specact.lab.rollout.processes import linked, serving
from specact.load import load_pair

# Deadlines of a pair that waits for its target, a control period or the duration of its four actions, and of the
# asynchronous remote target [ms]. Late verdicts have that of specact run, the latter of the former two.
PERIOD_MS, CHUNK_MS, REMOTE_MS = 50, 200, 1000
EPISODES, RATE = 20, "0.4"
# For each target the name of its pair, shares of a core, and the Euler steps of the target with fewer steps.
TARGETS: dict[str, tuple[str, tuple[float, ...], int]] = {
    "metaworld-tokens": ("tokens", (1.0, 0.25, 0.1, 0.05), 0), "metaworld-flow": ("flow", (1.0, 0.1, 0.05), 1),
}  # fmt: skip
RECORDING = "tyrell_roundtrip024.csv"
LINKS = ("wifi-paper", "lte", f"rtt:{RECORDING}")


class Method(NamedTuple):
    """A way to control the robot, over a link or not: a command, in which words in capitals are placeholders."""

    name: str
    linked: bool
    command: str


# With a slow target observations are old; the default limit on their age would stop the robot.
WAITING = "--gate never --max-chunk-age-ms 5000"
# The whole chunk may be executed, and the next one is requested at its start.
ASYNCHRONOUS = (
    "--execution aligned --execute-actions CHUNK --overlap-actions OVERLAP --idle nothing --max-chunk-age-ms 5000"
)
METHODS = (
    Method("target, waited for", False, f"run ALONE {WAITING}"),
    Method("target, asynchronous", False, f"play TARGET {ASYNCHRONOUS}"),
    Method("target, fewer steps", False, f"run FEWER {WAITING}"),
    Method("draft", False, "run PAIR --gate never"),
    Method("ADAHI", True, f"run PAIR --gate adahi --deadline-ms {PERIOD_MS}"),
    Method("hybrid", True, f"run PAIR --gate always --deadline-ms {PERIOD_MS}"),
    Method("ADAHI, 200 ms", True, f"run PAIR --gate adahi --deadline-ms {CHUNK_MS}"),
    Method("hybrid, 200 ms", True, f"run PAIR --gate always --deadline-ms {CHUNK_MS}"),
    Method("late ADAHI", True, "run PAIR --gate adahi --execution late"),
    Method("remote target, asynchronous", True, f"play SERVER {ASYNCHRONOUS} --deadline-ms {REMOTE_MS}"),
)
COMPARED = (
    ("late ADAHI", "draft"), ("ADAHI", "draft"), ("hybrid", "draft"), ("target, waited for", "draft"),
    ("target, asynchronous", "draft"), ("target, waited for", "remote target, asynchronous"),
    ("target, asynchronous", "remote target, asynchronous"), ("ADAHI, 200 ms", "draft"), ("hybrid, 200 ms", "draft"),
    ("ADAHI, 200 ms", "late ADAHI"), ("late ADAHI", "target, waited for"), ("late ADAHI", "target, asynchronous"),
    ("late ADAHI", "remote target, asynchronous"), ("target, fewer steps", "target, waited for"),
    ("target, fewer steps", "draft"), ("target, fewer steps", "remote target, asynchronous"),
)  # fmt: skip


def plan(pair_of: Callable[[str, Run], str]) -> Iterator[Cell]:
    """Every method on every link that it needs, at all shares of a core."""
    for target in TARGETS:
        for method in METHODS:
            if "FEWER" not in method.command or TARGETS[target][2]:
                for link in LINKS if method.linked else ("",):
                    name = file_stem(f"{method.name}-{link}".rstrip("-"))
                    yield Cell(f"device/{target}/{name}", partial(measure, target, method, link, pair_of))


def measure(
    target: str, method: Method, link: str, pair_of: Callable[[str, Run], str], folder: Path, run: Run
) -> list[dict[str, Any]]:
    """A method at every share of a core."""
    name, shares, fewer = TARGETS[target]
    path = pair_of(name, run)
    pair = load_pair(path)
    chunk = pair.parts.spec.target.chunk
    stands = {"PAIR": path, "TARGET": target, "CHUNK": str(chunk), "OVERLAP": str(chunk - 1)}
    # As many actions of a chunk as in the pair: executing more of them is a different policy.
    for word, steps in (("ALONE", 10), ("FEWER", fewer)):
        if word in method.command:
            stands[word] = made_pair(folder / word.lower(), target, target, execute=pair.execute, draft_steps=steps)
    with ExitStack() as stack:
        server = stack.enter_context(serving(path if "PAIR" in method.command else target))
        where = f"rtt:{run.needed('recorded links') / RECORDING}" if link.startswith("rtt:") else link
        port = stack.enter_context(linked(server.port, where, run.seed)).port if link else server.port
        stands["SERVER"] = f"ws://127.0.0.1:{port}"
        options = [stands.get(word, word) for word in method.command.split()]
        options += ["--server", stands["SERVER"]] if options[0] == "run" else []
        options += ["--rate", RATE] if "adahi" in options else []
        return [{"method": method.name, "link": link, "share": share} | drive(options, share, run) for share in shares]


def drive(options: Sequence[str], share: float, run: Run) -> dict[str, Any]:
    """One run of the robot: what is kept of its summary."""
    words = ("--device-share", share, "--episodes", run.few(EPISODES), "--seed", run.seed, "--json")
    said = json.loads(specact(*options, "--env", "metaworld", "--live", *words, OMP_NUM_THREADS="1"))
    episodes = said["episodes"]
    return {
        "inferences": said["inferences"], "inference_ms": said["inference_ms"], "sent": said["sent"],
        "misses": said["missed"],
        "late": said.get("late") and {"missed": said["late"]["missed"], "transmitted": said["late"]["requests"]},
        "episodes": len(episodes), "successes": sum(episode["success"] for episode in episodes),
        "won": to_digits(episode["success"] for episode in episodes),
        "steps": sum(episode["steps"] for episode in episodes), "held": sum(episode["held"] for episode in episodes),
        "world_late_ms": max(episode["world_late_ms"] for episode in episodes),
    }  # fmt: skip


def contrasts(cells: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The contrasts of :data:`COMPARED`, at one share on the same episodes; methods without a link at every link."""
    won = {(row["method"], row["link"], row["share"]): from_digits(row["won"]) for row in cells}
    pairs = [
        ((first, link, share), (second, over, share))
        for first, link, share in won
        for name, second in COMPARED
        for over in sorted({where for which, where, _ in won if which == second and "" in (where, link)} | {link})
        if name == first and (second, over, share) in won
    ]
    return [
        {**row, "first": first, "second": second, "link": link or over, "share": share}
        for row, ((first, link, share), (second, over, _)) in zip(paired(won, pairs), pairs, strict=True)
    ]


def missed_share(cell: Mapping[str, Any]) -> float | None:
    """The share of the requests without an answer in time; None where nothing is requested, or where it is unknown."""
    if cell["method"] == "late ADAHI":
        # A verdict's miss comes after its inference's tick, so it is counted apart.
        late = cell.get("late")
        return None if late is None else late["missed"] / max(1, late["transmitted"])
    if not cell["link"]:
        return None
    # What runs a policy alone has no gate.
    rate = 1.0 if cell["sent"] is None else cell["sent"]
    return float(sum(cell["misses"].values()) / max(1.0, rate * cell["inferences"]))
