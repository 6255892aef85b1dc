"""Robots in real time behind a link that is pulled: each in processes of its own, all at the same moments."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from itertools import pairwise
from multiprocessing import get_context
from typing import Any

from websockets.sync.client import connect

from experiments.measure import connected, to_digits
from specact.errors import ConfigError
from specact.execution.player import WAIT, LateVerdicts
from specact.execution.schedule import Execution
from specact.families.chunks.policy import Chunk, ChunkSpec, Inpainting
from specact.gates import Never, calibrated_gate
from specact.lab.envs.live import Frame, LiveRobot
from specact.lab.envs.pusht import ARENA_PX, GOAL_ANGLE_RAD, GOAL_XY_PX, HALF_PX
from specact.lab.rollout.processes import serving
from specact.lab.rollout.rollout import episode_seed
from specact.links.link import load_link
from specact.links.shaper import Shaper
from specact.load import load_pair, load_policy
from specact.observation import Window
from specact.policy import SpeculativePolicy
from specact.remote.target import remote_verifier
from specact.rng import StepAddress
from specact.robot.chunks import ChunkRunner, Inference, InferenceThread, LocalSource
from specact.robot.loop import Acting, Tick, run_loop
from specact.types import CLOCK, Miss, Origin
from specact.wire import openpi

BUNDLE, LINK, RATE = "pusht", "wifi-paper", 0.6
METHODS = {
    "target": "plain client: asks, waits, plays the chunk",
    "target_ahead": "plain client: asks for the next chunk early",
    "adahi_late": "`specact run --execution late`",
    "adahi": "`specact run`",
    "draft": "the draft alone, no server",
    "target_on_device": "the target on the device, no server",
}
PERIOD_S, EPISODE_S, READY_S = 0.1, 30.0, 45.0
# Within every episode [s]: when the link is pulled, for how long, and how much is filmed.
PULLED_S, OUTAGE_S, FILM_S = 3.0, 5.0, 10.5
_PAUSE_S, _FILMED = 2.0, 1 + round(FILM_S / PERIOD_S)


class PlainClient:
    """A source of chunks in openpi's protocol that waits for every reply, as openpi's own client does."""

    inpaints = False

    def __init__(self, port: int, spec: ChunkSpec) -> None:
        self.spec, self._socket = spec, connect(f"ws://127.0.0.1:{port}", compression=None, max_size=None)
        self._socket.recv()  # its metadata
        self.ask(spec.observation.zeros(), StepAddress(0, 0, 0, 0))  # a server sends away who never asks

    def ask(self, window: Window, address: StepAddress, inpainting: Inpainting | None = None) -> Chunk | Miss:
        seen = {f"observation/{name}": array for name, array in window.arrays.items()}
        self._socket.send(openpi.encode({**seen, "address": list(address)}))
        chunk: Chunk = openpi.decode(self._socket.recv())["actions"]  # type: ignore[arg-type]
        return chunk


class Watched(LiveRobot):
    """A world that keeps what it said after every control period."""

    def __init__(self, *arguments: Any) -> None:
        self.frames: list[Frame] = []
        super().__init__(*arguments)

    def _expect(self, within_s: float) -> Frame:
        self.frames.append(super()._expect(within_s))
        return self.frames[-1]


def acting_of(method: str, ports: Sequence[int], seed: int, stack: ExitStack) -> Acting:
    """What drives the robot; ``ports`` are those of the pair's server and of the target's alone."""
    pair = load_pair(BUNDLE)
    if method == "draft":
        return SpeculativePolicy(pair, Never(), seed=seed)
    if method.startswith("adahi"):
        late = method == "adahi_late"
        client = stack.enter_context(connected(ports[0], pair.exchange.contract, method))
        verifier = remote_verifier(client, pair, 1e3 * PERIOD_S * (pair.execute if late else 1))
        return SpeculativePolicy(
            pair, calibrated_gate(pair, "adahi", RATE), verifier=verifier,
            verdicts=LateVerdicts(math.inf) if late else WAIT, seed=seed,
        )  # fmt: skip
    policy = load_policy(f"{BUNDLE}#target").policy
    source = LocalSource(policy) if method == "target_on_device" else PlainClient(ports[1], policy.spec)
    if method == "target_ahead":
        thread = stack.enter_context(InferenceThread(source))
        return ChunkRunner(thread, Execution("aligned", pair.execute, pair.execute // 2), idle="nothing", seed=seed)
    return ChunkRunner(Inference(source), Execution("synchronous", pair.execute), idle="nothing", seed=seed)


def drive(method: str, ports: Sequence[int], starts: dict[int, float], seed: int) -> list[dict[str, Any]]:
    """Drives one robot through episodes, each from its moment on the monotonic clock [s]."""
    summaries, origins = [], dict[int, Origin | None]()
    with ExitStack() as stack:
        robot = Watched(BUNDLE, load_pair(BUNDLE).observation)
        stack.callback(robot.close)
        acting = acting_of(method, ports, seed, stack)

        def note(tick: Tick) -> None:
            origins[robot.last.steps] = acting.origin

        for episode, start in starts.items():
            if (left := start - time.monotonic()) < 0.0:
                raise ConfigError(f"{method} was {-left:.1f} s too late for episode {episode}; the load is high")
            time.sleep(left)
            robot.frames.clear()
            robot.start(episode_seed(seed, episode, robot.task))
            acting.reset(episode)
            origins.clear()
            run_loop(robot, acting, PERIOD_S, CLOCK, lambda: not robot.done, note)
            summaries.append({"episode": episode} | summary_of(robot.frames, origins))
    return summaries


def summary_of(frames: Sequence[Frame], origins: dict[int, Origin | None]) -> dict[str, Any]:
    """An episode: by control period whether the robot stood ``still`` and from ``whom`` its action came; its ``path``.

    Also ``success_s``, when it first succeeded, or the length of an episode; the world's own greatest lateness.
    """
    first = max(number for number, frame in enumerate(frames) if frame.steps == 0)
    frames = frames[first:]
    won = next((frame.steps for frame in frames if frame.outcome["success"]), None)
    stood = [later.held > earlier.held for earlier, later in pairwise(frames)]
    sources = [origins.get(step) for step in range(len(stood))]
    return {
        "still": to_digits(stood),
        "whom": "".join("-" if source is None else str(int(source)) for source in sources),
        "success": won is not None, "success_s": EPISODE_S if won is None else round(won * PERIOD_S, 1),
        "world_late_ms": round(1e3 * frames[-1].late_s, 1),
        "path": [pose_of(frame.observation) for frame in frames[:_FILMED]],
    }  # fmt: skip


def pose_of(observation: Any) -> list[float]:
    """Agent x and y, block x and y [px], and the block's angle [rad]."""
    state = observation["state"].astype(float)
    agent, block = state[:2] * HALF_PX + ARENA_PX / 2, state[2:4] * HALF_PX + GOAL_XY_PX
    angle = math.atan2(state[4], state[5]) + GOAL_ANGLE_RAD
    return [*(round(float(value), 1) for value in (*agent, *block)), round(angle, 3)]


def race(methods: Sequence[str], episodes: Sequence[int], seed: int) -> dict[str, list[dict[str, Any]]]:
    """Every method's episodes at the same time, on one link that is pulled once in each of them."""
    lap = EPISODE_S + _PAUSE_S
    begins = [READY_S + lap * number for number in range(len(episodes))]
    link = load_link(LINK + "".join(f"+outage={begin + PULLED_S:g}:{OUTAGE_S:g}" for begin in begins))
    with ExitStack() as stack:
        served = [stack.enter_context(serving(source)).port for source in (BUNDLE, f"{BUNDLE}#target")]
        now = time.monotonic()
        ports = [stack.enter_context(Shaper(link, "127.0.0.1", port, seed=seed)).port for port in served]
        starts = {episode: now + begin for episode, begin in zip(episodes, begins, strict=True)}
        robots = stack.enter_context(ProcessPoolExecutor(len(methods), mp_context=get_context("spawn")))
        driven = {method: robots.submit(drive, method, ports, starts, seed) for method in methods}
        return {method: future.result() for method, future in driven.items()}
