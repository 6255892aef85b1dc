"""The overhead of an evaluation in virtual time over its lower bound: only simulator and ``session.run``.

One shard of each of six methods runs once while its calls are kept: every reset and every step of the environment, and
every inference with its batch. Then the shard and these calls alone, in their order, take turns. The time of a shard
includes its tables' way to files. *All of it* is an evaluation of these methods from loading the bundle to the
summary. The last lines are the same on one and on all processors, whose processes start within that time.

Run: python benchmarks/rollouts.py [BUNDLE ...]
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
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
from specact.gates.settings import BUNDLE_DEFAULTS
from specact.lab.envs import load_task
from specact.lab.envs.robot import SimulatedRobot
from specact.lab.evaluation.chance import gate_at_rate_of_rival, uncalibrated_gate
from specact.lab.evaluation.evaluation import Evaluation
from specact.lab.evaluation.run import evaluate, write_shard
from specact.lab.rollout import rollout
from specact.lab.rollout.methods import load_method
from specact.lab.rollout.pool import Pool
from specact.lab.rollout.rollout import Shard, run_shard

METHODS = ("draft", "target", "hybrid", "random", "adahi", "learned")
ROUNDS, EPISODES = 5, 20

Tape = list[Callable[[], Any]]


class TapedEnv(gym.Wrapper[Any, Any, Any, Any]):
    """Records the calls of an environment while ``tape`` is set."""

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
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for name in sys.argv[1:] or ("ball", "pusht"):
            bundle = load_pair(name)
            assert isinstance(bundle, Bundle)
            print(
                f"{name}: {EPISODES} episodes per method; CPU time in one process, medians of {ROUNDS} rounds, "
                f"one round for all of it; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs"
            )
            for method in METHODS:
                shard = shard_of(bundle, method)
                for kind in ("steps", "episodes"):
                    (folder / kind / method).mkdir(parents=True, exist_ok=True)

                def work(shard: Shard = shard) -> None:
                    write_shard(folder, shard, *run_shard(shard))

                print(f"  {method:13} {measure(work, bundle, bundle.env, ROUNDS)}", flush=True)
            all_of_it = partial(evaluation, name, folder, 1)
            print(f"  {'all of it':13} {measure(all_of_it, bundle, bundle.env, 1)}", flush=True)
            for workers in sorted({1, os.cpu_count() or 1}):
                start = time.perf_counter()
                steps = evaluation(name, folder, workers)
                seconds = time.perf_counter() - start
                print(f"  {workers} processes: {steps:,} steps in {seconds:.1f} s, {steps / seconds:,.0f} per second")


def shard_of(bundle: Bundle, name: str) -> Shard:
    """The method's first shard, with its stored calibration, random gates at 0.6, and fixed accounted times."""
    method = load_method(name)
    gate = uncalibrated_gate(method, BUNDLE_DEFAULTS, bundle)
    stored = find_calibration(bundle, method.gate, 0.6)
    if stored is not None:
        gate = stored.settings
    elif method.rate_of is not None:
        gate = gate_at_rate_of_rival(method, gate, 0.6, {})
    shard = Shard.of(bundle, bundle.env, method, gate, range(EPISODES), 1)
    return replace(shard, link="wifi-paper", draft_s=2e-4, target_s=5e-4, gate_s=5e-5)


def measure(work: Callable[[], Any], bundle: Bundle, env: str, rounds: int) -> str:
    """CPU time of a piece of work in this process, and that of its recorded calls alone."""
    tape = record(work, bundle, env)
    steps = sum(call.func.__name__ == "step" for call in tape)  # type: ignore[attr-defined]
    rows = []
    for _ in range(rounds):
        start = time.process_time()
        work()
        between = time.process_time()
        for call in tape:
            call()
        rows.append((between - start, time.process_time() - between))
    took, alone = 1e6 * np.array(rows).T / steps
    return (
        f"{steps:6,} steps, {np.median(took):6.1f} us each, the calls alone {np.median(alone):6.1f} us: "
        f"{np.median(alone / took):.2f} of the bound"
    )


def record(work: Callable[[], Any], bundle: Bundle, env: str) -> Tape:
    """The calls of simulator and networks that a piece of work makes."""
    worlds, tape = rollout._worlds(env, bundle.observation), list[Callable[[], Any]]()
    while len(worlds) < EPISODES:
        worlds.append(SimulatedRobot(load_task(env, bundle.observation)))
        worlds[-1].env = TapedEnv(worlds[-1].env)
    pair = rollout._pair(bundle.source, bundle.fingerprint, (None, None))
    assert isinstance(pair, Bundle)
    networks = (pair.draft, pair.target, load_head(bundle))
    for network in networks:
        _keep(network, tape)
    TapedEnv.tape = tape
    work()
    TapedEnv.tape = None
    for network in networks:
        del network.__dict__[_batched(network)]
    return tape


def _batched(network: OnnxPolicy | TargetHead) -> str:
    return "infer_batch" if isinstance(network, OnnxPolicy) else "estimate_batch"


def _keep(network: OnnxPolicy | TargetHead, tape: Tape) -> None:
    """Makes a network record its calls of ``session.run``."""
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


def evaluation(name: str, folder: Path, workers: int) -> int:
    """Runs an evaluation of the methods that the bundle has a calibration for; returns its control steps."""
    what = Evaluation(name, None, METHODS, EPISODES, draft_ms=0.2, gate_ms=0.05, head_ms=0.1, target_ms=0.5)
    with Pool(workers) as pool:
        summary = evaluate(what, Path(tempfile.mkdtemp(dir=folder)), lambda *_: None, pool)
    return sum(method["control_steps"] for method in summary["methods"].values())


if __name__ == "__main__":
    main()
