"""How near an evaluation in virtual time comes to its bound: simulator and ``session.run`` with nothing around them.

One shard of every method runs once while its calls are kept: every reset and every step of the environment, and every
inference with its batch. Then the shard and these calls alone, in their order, take turns. A shard's time includes its
tables' way to files. The last line is of a whole evaluation on all processes.

Run: python benchmarks/rollouts.py [BUNDLE ...]
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from specact.families.codes.bundle import Bundle
from specact.families.codes.head import TargetHead, load_head
from specact.families.codes.network import OnnxPolicy
from specact.families.load import load_pair
from specact.gates.calibration import find_calibration
from specact.lab.envs import load_task
from specact.lab.envs.robot import SimulatedRobot
from specact.lab.evaluation.chance import asked_gate, at_rate
from specact.lab.evaluation.evaluation import Evaluation
from specact.lab.evaluation.run import evaluate, write_shard
from specact.lab.rollout import rollout
from specact.lab.rollout.methods import METHODS, load_method
from specact.lab.rollout.pool import Pool
from specact.lab.rollout.rollout import Shard, run_shard

SHOWN = (
    "draft",
    "target",
    "hybrid",
    "random",
    "adahi",
    "gated_target",
    "uncertainty",
    "learned",
    "head_draft",
    "oracle",
)
ROUNDS, EPISODES = 7, 20

Tape = list[Callable[[], Any]]


class TapedEnv(gym.Wrapper[Any, Any, Any, Any]):
    """Keeps the calls of an environment while ``tape`` is one."""

    tape: Tape | None = None

    def reset(self, **options: Any) -> Any:
        if TapedEnv.tape is not None:
            TapedEnv.tape.append(partial(self.env.reset, **options))
        return self.env.reset(**options)

    def step(self, action: Any) -> Any:
        if TapedEnv.tape is not None:
            TapedEnv.tape.append(partial(self.env.step, action.copy()))
        return self.env.step(action)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for name in sys.argv[1:] or ("ball", "pusht"):
            bundle = load_pair(name)
            assert isinstance(bundle, Bundle)
            print(
                f"{name}: one shard of {EPISODES} episodes per method in one process, medians of {ROUNDS} rounds; "
                f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs"
            )
            for method in SHOWN:
                print(f"  {method:13} {measure(shard_of(bundle, method), bundle, Path(folder))}", flush=True)
            print(f"  {whole(name, Path(folder) / name)}", flush=True)


def shard_of(bundle: Bundle, name: str) -> Shard:
    """The method's first shard, with its stored calibration, chance at a rate of 0.6, and fixed accounted times."""
    method = load_method(name)
    gate = asked_gate(name, Evaluation(bundle.name, None, (name,), EPISODES), bundle)
    stored = find_calibration(bundle, method.gate, 0.6)
    if stored is not None:
        gate = stored.settings
    elif method.rate_of is not None:
        gate = at_rate(gate, 0.6, None)
    return Shard(
        bundle.source, bundle.fingerprint, bundle.env, name, gate, tuple(range(EPISODES)), 1, "wifi-paper",
        2e-4, 5e-4, gate_s=5e-5,
    )  # fmt: skip


def measure(shard: Shard, bundle: Bundle, folder: Path) -> str:
    """Times of a shard and of its calls alone."""
    tape = record(shard, bundle)
    for kind in ("steps", "episodes"):
        (folder / kind / shard.method).mkdir(parents=True, exist_ok=True)
    steps = sum(call.func.__name__ == "step" for call in tape)  # type: ignore[attr-defined]
    rows = []
    for _ in range(ROUNDS):
        start = time.process_time()
        write_shard(folder, shard, *run_shard(shard))
        between = time.process_time()
        for call in tape:
            call()
        rows.append((between - start, time.process_time() - between))
    whole, alone = np.array(rows).T
    return (
        f"{steps:6,} steps, {1e6 * np.median(whole) / steps:6.1f} us each, "
        f"{1e6 * np.median(alone) / steps:6.1f} us the calls alone: {np.median(alone / whole):.2f} of the bound"
    )


def record(shard: Shard, bundle: Bundle) -> Tape:
    """The calls of simulator and networks that a shard makes."""
    worlds, tape = rollout._worlds(shard.env), list[Callable[[], Any]]()
    while len(worlds) < EPISODES:
        worlds.append(SimulatedRobot(load_task(shard.env)))
        worlds[-1].env = TapedEnv(worlds[-1].env)
    pair = rollout._pair(shard.bundle, shard.fingerprint, shard.named)
    networks: list[Any] = [pair.draft, pair.target]
    if load_method(shard.method).uses_head:
        networks.append(load_head(bundle))
    for network in networks:
        _keep(network, tape)
    TapedEnv.tape = tape
    run_shard(shard)
    TapedEnv.tape = None
    for network in networks:
        del network.__dict__[_batched(network)]
    return tape


def _batched(network: OnnxPolicy | TargetHead) -> str:
    return "infer_batch" if isinstance(network, OnnxPolicy) else "estimate_batch"


def _keep(network: OnnxPolicy | TargetHead, tape: Tape) -> None:
    """Lets a network keep its calls of ``session.run``."""
    session, plain = network._session, getattr(network, _batched(network))

    class Kept:
        def run(self, outputs: Any, inputs: dict[str, Any], *rest: Any) -> Any:
            tape.append(partial(session.run, outputs, {key: value.copy() for key, value in inputs.items()}))
            return session.run(outputs, inputs, *rest)

    def batched(*given: Any) -> Any:
        network._session = Kept()  # type: ignore[assignment]
        try:
            return plain(*given)
        finally:
            network._session = session

    setattr(network, _batched(network), batched)


def whole(name: str, folder: Path) -> str:
    """Control steps per second of an evaluation of all methods, processes and files included."""
    with Pool() as pool:
        start = time.perf_counter()
        summary = evaluate(Evaluation(name, None, tuple(METHODS), 40), folder, lambda *_: None, pool)
        seconds = time.perf_counter() - start
    steps = sum(method["control_steps"] for method in summary["methods"].values())
    return (
        f"{steps:,} control steps of {len(METHODS)} methods in {seconds:.1f} s on {os.cpu_count()} processes: "
        f"{steps / seconds:,.0f} steps/s"
    )


if __name__ == "__main__":
    main()
