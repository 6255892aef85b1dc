"""Episodes of a sweep whose truth is known, in the form in which a sweep writes them."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit

from specact.lab.rollout.steps import Table
from specact.lab.tised.equations import age_s, chunk_s, exact_task_s, stall_s

STEPS = (10, 5, 2, 1)
BASELINES = {"steps": 10.0, "overlap": 0.0}
ACTION_S, EXECUTE, LIMIT_S = 0.05, 8, 60.0
HARDWARE = {"this-machine": 1.0, "agx-50w": 10.0, "agx-30w": 16.0, "agx-15w": 32.0}
# What fewer steps cost: how many times as many chunks, and how much of the log odds of success.
MORE_CHUNKS = {10: 1.0, 5: 1.05, 2: 1.3, 1: 2.0}
LOST_ODDS = {10: 0.0, 5: 0.1, 2: 0.5, 1: 2.5}


def inference_s(steps: float) -> float:
    """On this machine."""
    return 0.004 + 0.003 * steps


def episodes(
    lever: str,
    strength: float,
    *,
    pace: float,
    hardware: str,
    kappa: float,
    chunks: float,
    odds: float,
    each_s: float,
    overlap: int = 0,
    link: str = "none",
    response: float = 10.0,
    idle: str = "hold",
    static: bool | None = None,
    count: int = 200,
    seed: int = 0,
) -> Table:
    """One setting's episodes: ``P = expit(odds - response v age)``, N around ``chunks``.

    Episode k is as hard for all settings. The world is static at pace 0, if nothing else is said.
    """
    hard = np.random.default_rng(seed).random((2, count))
    rng = np.random.default_rng([seed, int(1000 * strength), int(kappa), int(1000 * pace), overlap])
    age = float(age_s(each_s, ACTION_S, overlap=overlap))
    success = hard[0] < expit(odds - response * pace * age)
    n = np.maximum(1, np.rint(chunks * (0.7 + 0.6 * hard[1]) * rng.normal(1.0, 0.05, count)))
    task_s = exact_task_s(n, each_s, ACTION_S, EXECUTE, overlap=overlap)
    success &= task_s <= LIMIT_S
    n = np.where(success, n, np.ceil(LIMIT_S / chunk_s(each_s, ACTION_S, EXECUTE, overlap=overlap)))
    columns: Mapping[str, object] = {
        "lever": lever, "strength": float(strength), "task": "ball" if pace == 0.0 else "chase", "pace": pace,
        "idle": idle, "static": pace == 0.0 if static is None else static, "hardware": hardware, "kappa": kappa,
        "link": link, "execution": "naive" if overlap else "synchronous", "overlap": overlap, "execute": EXECUTE,
        "limit_s": LIMIT_S, "inference_s": each_s, "age_s": age,
        "sent": np.nan,
    }  # fmt: skip
    return {
        **{name: np.full(count, value) for name, value in columns.items()},
        "episode": np.arange(count),
        "success": success,
        "score": success.astype(float),
        "task_s": np.where(success, task_s, LIMIT_S),
        "chunks": n.astype(np.int64),
        "stall_s": each_s + (n - 1) * stall_s(each_s, ACTION_S, overlap=overlap),
        "jerk": rng.gamma(4.0, 0.5, count) * (1.0 + 1.0 / strength if lever == "steps" else 1.0 + 0.1 * strength),
        "path": rng.gamma(9.0, 0.2, count),
    }


def join(tables: Sequence[Table]) -> Table:
    """One after the other."""
    return {name: np.concatenate([table[name] for table in tables]) for name in tables[0]}


def steps_sweep(paces: Sequence[float] = (0.0, 0.2, 0.4), count: int = 200) -> Table:
    """Refinement steps: on fast hardware fewer steps only cost chunks, on slow hardware they pay."""
    return join(
        [
            episodes(
                "steps", s, pace=pace, hardware=name, kappa=kappa, chunks=30 * MORE_CHUNKS[s], odds=2.5 - LOST_ODDS[s],
                each_s=kappa * inference_s(s), count=count,
            )
            for pace in paces
            for name, kappa in HARDWARE.items()
            for s in STEPS
        ]
    )  # fmt: skip


def overlap_sweep(count: int = 200) -> Table:
    """Overlap depth in a world that waits: N = 30 (1 + .01 m)."""
    return join(
        [
            episodes(
                "overlap", m, pace=0.0, hardware=name, kappa=kappa, chunks=30 * (1 + 0.01 * m), odds=2.5,
                each_s=kappa * inference_s(10), overlap=m, count=count,
            )
            for name, kappa in HARDWARE.items()
            for m in (0, 1, 2, 4, 7, 8)
        ]
    )  # fmt: skip


def shuffled(table: Table, seed: int = 0) -> Table:
    """The same rows in another order, as a pool of processes writes them."""
    order: NDArray[np.int64] = np.random.default_rng(seed).permutation(len(table["episode"]))
    return {name: values[order] for name, values in table.items()}
