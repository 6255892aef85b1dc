"""Work on a Ray cluster of two nodes, which are processes of this machine."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specact.lab.rollout.methods import HYBRID

# Read when Ray is imported: its processes are to listen on loopback alone.
os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import pytest
from tests.children import has_ended, wait_for
from tests.cluster_work import end_once, finish_after, shard_on_node, square_root
from tests.tiny import quiet

import specact
from specact.errors import BundleError, ConfigError, SpecactError
from specact.gates.settings import GateSettings
from specact.lab.evaluation.run import Evaluation, evaluate
from specact.lab.rollout.pool import Pool, join
from specact.lab.rollout.rollout import Shard, run_shard
from specact.pair import PairSource

if TYPE_CHECKING:
    from ray.cluster_utils import Cluster
    from tests.conftest import Run

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.nightly

ROOT = Path(__file__).parents[1]
PATIENCE_S = 600.0
NODE: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 80 * 2**20, "include_log_monitor": False}
WHAT = Evaluation(
    "ball", methods=("draft", "adahi"), episodes=8, shard=2, draft_ms=1.0, gate_ms=0.1, target_ms=2.0, seed=5
)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False, "no_monitor": True})
    made.add_node(**NODE)
    made.wait_for_nodes()
    # Once for all pools of this process, so that workers are kept.
    assert join(f"ray:{made.address}")
    yield made
    ray.shutdown()
    made.shutdown()


@pytest.fixture
def on(cluster: Cluster) -> str:
    return f"ray:{cluster.address}"


def files(folder: Path) -> dict[str, bytes]:
    """What a finished run holds, but for who measured it and how long it took."""
    contents = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.parquet")}
    summary = json.loads((folder / "summary.json").read_text()) | {"seconds": 0}
    return contents | {"summary": json.dumps(summary).encode()}


def shard(first: int, **changes: Any) -> Shard:
    ball = specact.load_pair("ball")
    return replace(Shard.of(ball, "ball", HYBRID, GateSettings("always"), (first, first + 1), 3), **changes)


class StoppedError(Exception):
    """Stands for a kill."""


def test_an_evaluation_on_two_nodes_stopped_and_resumed_has_the_bytes_of_one_here(on: str, tmp_path: Path) -> None:
    evaluate(WHAT, tmp_path / "here", quiet, Pool(1))

    def stop(what: str, done: int, total: int) -> None:
        if what == "adahi" and done >= 4:
            raise StoppedError

    with pytest.raises(StoppedError), Pool(on=on) as pool:
        evaluate(WHAT, tmp_path / "there", stop, pool)
    assert pool.workers == 2
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "there").rglob("*.parquet")}
    assert kept and not (tmp_path / "there/summary.json").exists()
    with Pool(2, on) as pool:
        evaluate(WHAT, tmp_path / "there", quiet, pool)
    assert files(tmp_path / "there") == files(tmp_path / "here")
    assert {path: path.stat().st_mtime_ns for path in kept} == kept, "finished shards were run again"


def test_a_node_that_is_lost_costs_its_running_shards_which_run_again(
    cluster: Cluster, on: str, tmp_path: Path
) -> None:
    shards = [shard(first) for first in range(0, 10, 2)]
    lost = cluster.add_node(**NODE)
    cluster.wait_for_nodes()
    with Pool(3, on) as pool, ThreadPoolExecutor(1) as beside:
        ran = beside.submit(lambda: list(pool.each(shard_on_node, [(part, tmp_path) for part in shards])))
        wait_for(lambda: any(tmp_path.glob(f"*-{lost.node_id}")))
        (marker,) = tmp_path.glob(f"*-{lost.node_id}")
        cluster.remove_node(lost, allow_graceful=False)
        # A worker outlives its node for a moment, in which it could still finish.
        wait_for(lambda: has_ended(int(marker.read_text())))
        (tmp_path / "go").touch()
        results = {item.episodes: result for (item, _), result in ran.result(PATIENCE_S)}
    began = [path.name for path in tmp_path.glob("*-*")]
    reruns = len(began) - len(shards)
    assert reruns == sum(name.endswith(lost.node_id) for name in began) == 1, "other shards ran again, or none was lost"
    for part in shards:
        outcomes, table = run_shard(part)
        assert results[part.episodes][0] == outcomes
        assert {name: values.tobytes() for name, values in results[part.episodes][1].items()} == {
            name: values.tobytes() for name, values in table.items()
        }


def test_a_worker_that_is_killed_costs_its_work_and_not_for_ever(on: str, tmp_path: Path) -> None:
    with Pool(2, on) as pool:
        items = [("one", tmp_path), ("two", tmp_path)]
        assert sorted(made for _, made in pool.each(end_once, items)) == ["one", "two"]
        with pytest.raises(SpecactError, match=r"lost with its worker 4 times.*finished results are kept"):
            list(pool.each(end_once, [("always", tmp_path)]))


def test_what_a_node_lacks_is_said_with_the_node(on: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "only_here.py").write_text("def work(item):\n    return item\n")
    # The workers look where this process looked when it joined.
    monkeypatch.syspath_prepend(tmp_path)
    work = importlib.import_module("only_here").work
    with Pool(2, on) as pool:
        with pytest.raises(SpecactError, match=r"could not take on the work: .*only_here"):
            list(pool.each(work, [1]))
        with pytest.raises(ConfigError, match=r"there is no folder .*nowhere") as lacking:
            list(pool.run([shard(0, source=PairSource(str(tmp_path / "nowhere")))]))
        with pytest.raises(BundleError, match=r"has fingerprint .* here, and 0123"):
            list(pool.run([shard(0, fingerprint="0123")]))
        with pytest.raises(ValueError, match="math domain"):
            list(pool.each(square_root, [-1.0]))
    assert "on the node 127.0.0.1: every node needs the bundles" in lacking.value.__notes__[0]


# Run in a process of its own, which joins the cluster itself.
WAITS = """
import sys
from pathlib import Path
from specact.lab.rollout.pool import Pool
from tests.children import has_ended, wait_for
from tests.cluster_work import wait_for_ever
with Pool(1, sys.argv[1]) as pool:
    list(pool.each(wait_for_ever, [Path(sys.argv[2])] * 3))
"""


def test_an_interrupted_process_leaves_no_task_behind(on: str, tmp_path: Path) -> None:
    words = [sys.executable, "-c", WAITS, on, str(tmp_path)]
    began = subprocess.Popen(words, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: (tmp_path / "process").exists() or began.poll() is not None)
    began.send_signal(signal.SIGINT)
    assert "KeyboardInterrupt" in began.communicate(timeout=PATIENCE_S)[1]
    wait_for(lambda: has_ended(int((tmp_path / "process").read_text())))


def test_leaving_a_pool_cancels_no_task_of_a_process_that_stays_in_the_cluster(on: str, tmp_path: Path) -> None:
    """Ray's cancellation of a task that is just finishing can abort this process."""
    last = tmp_path / "last"
    with Pool(2, on) as pool:
        next(pool.each(finish_after, [(0.0, tmp_path / "first"), (1.0, last)]))
        wait_for(last.with_suffix(".began").exists)
    assert last.exists()


def test_other_places_and_clusters_that_are_not_there_are_said_at_once(specact_run: Run, tmp_path: Path) -> None:
    for on in ("somewhere", "rays", "here:"):
        with pytest.raises(ConfigError, match="here, ray, or ray:ADDRESS"):
            Pool(1, on)
    for address in ("127.0.0.1:1", "ray://127.0.0.1:1"):
        words = ["eval", "--bundle", "ball", "--methods", "draft", "--out", tmp_path / "run", "--on", f"ray:{address}"]
        done = specact_run(*words)
        assert done.returncode == 2
        assert f"cannot join a Ray cluster (ray:{address})" in done.stderr and "ray:auto" in done.stderr
