"""The harness vla-eval itself against our server and our tasks: every episode is that of ``specact eval``."""

from __future__ import annotations

import http.client
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
from tests.children import wait_for
from tests.tiny import needs_bundle, renders

from specact.errors import ConfigError
from specact.lab.envs import load_task
from specact.lab.evaluation.run import Evaluation, evaluate, read_table
from specact.lab.rollout.pool import Pool

pytest.importorskip("vla_eval")

import vla_eval.api
from vla_eval.connection import Connection
from vla_eval.protocol.messages import Message, MessageType, pack_message, unpack_message

from specact.lab.vla_eval import PairServer, TaskBenchmark, from_harness, to_harness
from specact.load import load_pair

ROOT = Path(__file__).parents[2]
BENCHMARK = "specact.lab.vla_eval:TaskBenchmark"
SEED = 1


def benchmark(env: str, episodes: int, **more: Any) -> dict[str, Any]:
    params = {"env": env, "seed": SEED} | more.pop("params", {})
    return {"benchmark": BENCHMARK, "episodes_per_task": episodes, "params": params} | more


def of_harness(server: PairServer, entry: dict[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = vla_eval.api.evaluate(server, {"benchmarks": [entry]}, docker=False, no_save=True)[0]
    return result


def in_turn(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The episodes as ``specact eval`` numbers them: the tasks of a suite take turns."""
    together = zip(*(task["episodes"] for task in result["tasks"]), strict=True)
    return [episode for turn in together for episode in turn]


def of_ours(bundle: str, env: str, method: str, episodes: int, out: Path) -> list[dict[str, Any]]:
    """What ``specact eval`` says of the same episodes, inferred one by one."""
    times = {"draft_ms": 1.0, "target_ms": 1.0, "gate_ms": 1.0}
    what = Evaluation(bundle, env, (method,), episodes, SEED, shard=1, **times)  # type: ignore[arg-type]
    with Pool(1) as pool:
        evaluate(what, out, lambda *_: None, pool)
    table, steps = read_table(out / "episodes" / method), read_table(out / "steps" / method)
    sent = [float(steps["transmitted"][steps["episode"] == number].mean()) for number in range(episodes)]
    columns = (table[name].tolist() for name in ("steps", "success", "score"))
    return [
        {"steps": taken, "metrics": {"success": success, "score": score, "sent": rate}}
        for taken, success, score, rate in zip(*columns, sent, strict=True)
    ]


def told(episodes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    assert [episode for episode in episodes if "failure_reason" in episode] == []
    return [{name: episode[name] for name in ("steps", "metrics")} for episode in episodes]


@pytest.mark.parametrize(
    ("bundle", "env", "method", "episodes"),
    [("ball", "ball", "adahi", 4), ("ball", "ball", "random", 2), ("pusht-flow", "pusht", "flash", 1)],
)
def test_every_episode_is_that_of_eval(tmp_path: Path, bundle: str, env: str, method: str, episodes: int) -> None:
    results = told(in_turn(of_harness(PairServer(bundle, method), benchmark(env, episodes))))
    assert results == of_ours(bundle, env, method, episodes, tmp_path / "run")
    assert len({episode["steps"] for episode in results}) > 1 or episodes < 4


@renders
def test_a_suite_with_cameras_and_instructions_is_that_of_eval(tmp_path: Path) -> None:
    needs_bundle("metaworld")
    result = of_harness(PairServer("metaworld", "hybrid"), benchmark("metaworld", 1))
    assert [task["task"] for task in result["tasks"]] == list(load_task("metaworld").tasks)
    assert told(in_turn(result)) == of_ours("metaworld", "metaworld", "hybrid", 10, tmp_path / "run")


def test_observations_cross_unchanged() -> None:
    rng = np.random.default_rng(0)
    images = {f"image.{name}": rng.integers(0, 256, (6, 8, 3), dtype=np.uint8) for name in ("front", "wrist")}
    seen: dict[str, Any] = {"state": np.float32(rng.normal(size=4)), "instruction": "open the door", **images}
    sent = to_harness(seen)
    assert set(sent) == {"state", "images", "task_description"} and set(sent["images"]) == {"front", "wrist"}
    back = from_harness(unpack_message(pack_message(Message(MessageType.OBSERVATION, sent))).payload)
    assert set(back) == set(seen) and back["instruction"] == seen["instruction"]
    for name in ("state", "image.front", "image.wrist"):
        assert back[name].dtype == seen[name].dtype
        np.testing.assert_array_equal(back[name], seen[name])


def test_a_pair_says_its_cameras_and_a_benchmark_refuses_others() -> None:
    assert PairServer("ball", "draft").get_observation_params() == {}
    cameras = PairServer("pusht-camera", "draft").get_observation_params()["cameras"]
    assert cameras == {"image": [96, 96]}
    with pytest.raises(ConfigError, match=r"ball has no camera 'image', it has none; choose a pair"):
        TaskBenchmark("ball", cameras=cameras)


def test_sessions_that_alternate_do_not_disturb_each_other() -> None:
    """Each gets the actions it gets alone; none are given before an episode starts."""
    rng, fields = np.random.default_rng(0), load_pair("ball").observation.fields
    seen = [{name: np.float32(rng.normal(size=field.shape)) for name, field in fields.items()} for _ in range(12)]

    async def together(url: str, *episodes: int) -> list[list[Any]]:
        async with Connection(url) as first, Connection(url) as second:
            connections = (first, second)[: len(episodes)]
            for conn, episode in zip(connections, episodes, strict=True):
                await conn.start_episode({"task": {"seed": 5, "episode_idx": episode}})
            turns = [[(await conn.act(row))["actions"].tolist() for conn in connections] for row in seen]
            return [list(actions) for actions in zip(*turns, strict=True)]

    async def too_early(url: str) -> None:
        async with Connection(url) as conn:
            await conn.act(seen[0])

    with vla_eval.api.serve_background(PairServer("ball", "hybrid")) as served:
        solos = [anyio.run(together, served.url, episode)[0] for episode in (0, 1)]
        assert solos[0] != solos[1]
        assert anyio.run(together, served.url, 0, 1) == solos
        with pytest.raises(RuntimeError, match="no episode is under way on this connection; send episode_start first"):
            anyio.run(too_early, served.url)


class Wrong(PairServer):
    """Answers with what is no action of the ball's."""

    def predict(self, obs: dict[str, Any], ctx: Any) -> dict[str, Any]:
        return {"actions": np.zeros((4, 2))}


def test_what_is_no_action_fails_the_episode_with_a_sentence() -> None:
    result = of_harness(Wrong("ball", "draft"), benchmark("ball", 1))
    (episode,) = in_turn(result)
    assert episode["failure_reason"] == "env_step" and result["num_errors"] == 1
    assert "ball takes one finite action of the shape (2,) per step, got array([[0., 0.]" in episode["failure_detail"]


def test_a_gate_without_a_calibration_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match=r"has no calibration of 'adahi' at rate 0\.37"):
        PairServer("ball", "adahi", rate=0.37)


class Silent(PairServer):
    """Answers nothing before it is told to."""

    def __init__(self) -> None:
        super().__init__("ball", "draft")
        self.speak = threading.Event()

    def predict(self, obs: dict[str, Any], ctx: Any) -> dict[str, Any]:
        self.speak.wait(60.0)
        return super().predict(obs, ctx)


def test_live_a_robot_without_an_action_holds_and_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    server, step = Silent(), TaskBenchmark.step

    def speaking(self: TaskBenchmark, action: dict[str, Any]) -> Any:
        if self._world.steps == 19:
            server.speak.set()
        return step(self, action)

    monkeypatch.setattr(TaskBenchmark, "step", speaking)
    (episode,) = in_turn(of_harness(server, benchmark("ball", 1, mode="live", hz=200.0, max_steps=20)))
    assert episode["steps"] == 20 and "sent" not in episode["metrics"]
    assert episode["rt_metrics"]["stale_count"] == 20


def test_the_task_says_how_to_hold() -> None:
    for env, held in (("pusht", 0.0), ("ball", 0.25)):
        ours = TaskBenchmark(env)
        last = np.full(ours.get_hold_action(None)["actions"].shape, 0.25, np.float32)
        assert np.all(ours.get_hold_action(None)["actions"] == 0.0)
        assert np.all(ours.get_hold_action({"actions": last})["actions"] == held)
        ours.cleanup()


@contextmanager
def served(port: int, environment: dict[str, str], *arguments: str) -> Iterator[None]:
    """``python -m specact.lab.vla_eval``, once it says that it is well."""
    command = [sys.executable, "-m", "specact.lab.vla_eval", "--port", str(port), *arguments]
    with subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL) as process:
        try:
            wait_for(lambda: _well(port) or process.poll() is not None, "the server starts")
            assert process.poll() is None
            yield
        finally:
            process.kill()


def _well(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5.0)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        number: int = free.getsockname()[1]
        return number


def test_an_unknown_bundle_is_one_sentence(port: int, environment: dict[str, str]) -> None:
    command = [sys.executable, "-m", "specact.lab.vla_eval", "--port", str(port), "--args.bundle", "balk"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and done.stderr.startswith("error: unknown bundle 'balk'"), done.stderr
