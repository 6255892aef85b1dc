"""Recorded datasets: what is read is what was shown, by any number of processes, and in spite of any stop."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from tests.children import wait_for
from tests.lab import toys

from specact.errors import ConfigError, DataError
from specact.lab.data import lerobot_writing
from specact.lab.data.episodes import Episodes, concatenate
from specact.lab.data.fit import convert_to_task
from specact.lab.data.generate import demonstrate, generate, save
from specact.lab.data.info import describe
from specact.lab.data.lerobot_writing import Written
from specact.lab.data.readers import read
from specact.lab.data.record import Order, record
from specact.lab.envs import load_task
from specact.lab.rollout.pool import Pool

SUITE = f"{toys.__name__}:SUITE"
ORDER = Order(SUITE, seed=3, noise=0.8, pixels=16)
ROOT = Path(__file__).parents[3]


def one_by_one(work: Callable[[int], None], numbers: Iterable[int]) -> Iterator[tuple[int, None]]:
    for number in numbers:
        work(number)
        yield number, None


def recorded(out: Path, episodes: int = 3, order: Order = ORDER) -> Written:
    return record(order, out, episodes, one_by_one, lambda done, total: None)


def files(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()
    }


def shown(number: int) -> Episodes:
    """The episode of this number, made again."""
    task = ORDER.task()
    return demonstrate(task, task.make(), np.random.default_rng([3, number, 0]), 0.8, number).episode(20.0)


def test_what_is_read_is_what_was_shown(tmp_path: Path) -> None:
    made = recorded(tmp_path / "out")
    wanted = concatenate([shown(number) for number in range(6)])
    found = read(tmp_path / "out")
    assert made == Written(found.steps, {"go left": 3, "go right": 3}, {"go left": 3, "go right": 3})
    assert set(found.observation) == {"state", "image.top"} and found.rate_hz == 20.0
    np.testing.assert_array_equal(found.ends, wanted.ends)
    np.testing.assert_array_equal(found.action, wanted.action)
    np.testing.assert_array_equal(found.numbers("state"), wanted.numbers("state"))
    np.testing.assert_array_equal(found.frames("image.top")[:], wanted.frames("image.top")[:])
    assert found.instructions == wanted.instructions == 3 * ("go left", "go right")
    assert found.disturbed is not None and wanted.disturbed is not None
    np.testing.assert_array_equal(found.disturbed, wanted.disturbed)
    fitted = convert_to_task(toys.SUITE, found, "here")
    assert fitted.cameras == ("image.top",) and fitted.instructions == found.instructions
    assert not [warning for warning in describe(found, tmp_path / "out").warnings if "cannot be read" in warning]


def test_is_a_lerobot_dataset(tmp_path: Path) -> None:
    """By the columns and files that LeRobot's own loader looks for."""
    recorded(tmp_path)
    info = json.loads((tmp_path / "meta/info.json").read_text())
    data = pq.read_table(tmp_path / "data/chunk-000/file-000.parquet")
    episodes = pq.read_table(tmp_path / "meta/episodes/chunk-000/file-000.parquet").to_pylist()
    assert info["codebase_version"] == "v3.0" and info["fps"] == 20 and info["total_frames"] == len(data)
    assert set(info["features"]) == set(data.column_names)
    assert info["features"]["observation.images.top"]["shape"] == [16, 16, 3]
    assert data.column("index").to_pylist() == list(range(len(data)))
    assert [(row["dataset_from_index"], row["dataset_to_index"]) for row in episodes] == [
        (int(end) - row["length"], int(end))
        for row, end in zip(episodes, np.cumsum([row["length"] for row in episodes]), strict=True)
    ]
    assert [row["tasks"] for row in episodes] == 3 * [["go left"], ["go right"]]
    tasks = pq.read_table(tmp_path / "meta/tasks.parquet")
    assert dict(zip(tasks["task"].to_pylist(), tasks["task_index"].to_pylist(), strict=True)) == {
        "go left": 0,
        "go right": 1,
    }
    assert json.loads(tasks.schema.metadata[b"pandas"])["index_columns"] == ["task"]
    by_frame = [row["tasks"][0] for row in episodes for _ in range(row["length"])]
    assert [["go left", "go right"][index] for index in data["task_index"].to_pylist()] == by_frame
    # An episode is a group of rows.
    groups = pq.ParquetFile(tmp_path / "data/chunk-000/file-000.parquet").metadata
    assert [groups.row_group(k).num_rows for k in range(groups.num_row_groups)] == [row["length"] for row in episodes]


def test_statistics_are_those_of_all_frames(tmp_path: Path) -> None:
    recorded(tmp_path)
    found, stats = read(tmp_path), json.loads((tmp_path / "meta/stats.json").read_text())
    pixels = found.frames("image.top")[:].reshape(-1, 3) / 255.0
    for values, name, shape in (
        (found.action.astype(np.float64), "action", (2,)),
        (pixels, "observation.images.top", (3, 1, 1)),
    ):
        for statistic in ("min", "max", "mean", "std"):
            kept = np.array(stats[name][statistic])
            assert kept.shape == shape
            np.testing.assert_allclose(kept.ravel(), getattr(values, statistic)(axis=0), atol=1e-6)
        assert stats[name]["count"] == [found.steps]


def test_the_number_of_processes_changes_nothing(tmp_path: Path) -> None:
    recorded(tmp_path / "one")
    with Pool(2) as pool:
        record(ORDER, tmp_path / "two", 3, pool.each, lambda done, total: None)
    assert files(tmp_path / "one") == files(tmp_path / "two")


@pytest.mark.parametrize("parts", [1, 4])
def test_a_recording_that_was_killed_goes_on(tmp_path: Path, parts: int) -> None:
    """Killed at some place after so many episodes, by the clock of the machine."""
    words = ["data", "record", "--env", SUITE, "--seed", "3", "--noise", "0.8", "--pixels", "16", "--workers", "2"]
    command = [sys.executable, "-m", "specact", *words, "--episodes", "40"]
    process = subprocess.Popen(
        [*command, "--out", str(tmp_path / "killed")], cwd=ROOT, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    )
    written = (tmp_path / "killed").glob
    wait_for(lambda: len(list(written("parts/*.parquet"))) >= parts or process.poll() is not None)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    done = subprocess.run([*command, "--out", str(tmp_path / "killed"), "--json"], cwd=ROOT, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["kept"] == 80
    recorded(tmp_path / "whole", 40)
    assert files(tmp_path / "killed") == files(tmp_path / "whole")


def test_a_stop_while_the_parts_are_put_together_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded(tmp_path / "whole")
    with monkeypatch.context() as patch:
        patch.setattr(lerobot_writing, "_pooled", lambda *_: 1 / 0)  # between the table of episodes and info.json
        with pytest.raises(ZeroDivisionError):
            recorded(tmp_path / "stopped")
    assert (tmp_path / "stopped/meta/episodes").exists() and not (tmp_path / "stopped/meta/info.json").exists()
    recorded(tmp_path / "stopped")
    assert files(tmp_path / "stopped") == files(tmp_path / "whole")


def test_a_dataset_grows_and_keeps_what_it_has(tmp_path: Path) -> None:
    recorded(tmp_path / "grown", 1)
    before = files(tmp_path / "grown")
    recorded(tmp_path / "grown", 3)
    assert files(tmp_path / "grown")["data/chunk-000/file-000.parquet"] == before["data/chunk-000/file-000.parquet"]
    recorded(tmp_path / "whole", 3)
    grown, whole = read(tmp_path / "grown"), read(tmp_path / "whole")
    np.testing.assert_array_equal(grown.action, whole.action)
    np.testing.assert_array_equal(grown.frames("image.top")[:], whole.frames("image.top")[:])
    assert grown.instructions == whole.instructions
    stats = [json.loads((tmp_path / name / "meta/stats.json").read_text()) for name in ("grown", "whole")]
    assert stats[0] == stats[1]
    again = recorded(tmp_path / "grown", 3)
    assert again.kept == {"go left": 3, "go right": 3}
    with pytest.raises(ConfigError, match="holds 6 episodes, more than the 4 wanted"):
        recorded(tmp_path / "grown", 2)


def test_noise_disturbs_what_is_done_and_not_what_is_recorded(tmp_path: Path) -> None:
    recorded(tmp_path, 20)
    found = read(tmp_path)
    assert found.disturbed is not None and found.instructions is not None
    assert 0.05 < found.disturbed.mean() < 0.6
    state = found.numbers("state")
    for span, told in zip(found.slices(), found.instructions, strict=True):
        task = told.removeprefix("go ")
        expert = np.stack([toys.wanted(place, task) for place in state[span]])
        np.testing.assert_allclose(found.action[span], expert, atol=1e-5)
        moved = np.diff(state[span], axis=0)
        as_recorded = np.isclose(moved, toys.GAIN * found.action[span][:-1], atol=1e-5).all(axis=1)
        np.testing.assert_array_equal(as_recorded, ~found.disturbed[span][:-1])


def test_a_chunk_counts_up_to_its_first_disturbed_step() -> None:
    rng = np.random.default_rng(0)
    disturbed, ends = rng.random(30) < 0.3, np.array([7, 8, 30])
    episodes = Episodes(
        {"state": np.zeros((30, 1), np.float32)}, np.zeros((30, 1), np.float32), ends, None, None, disturbed
    )
    for calm in (False, True):
        found = Episodes(episodes.observation, episodes.action, ends) if calm else episodes
        wanted = np.zeros((30, 4), bool)
        for step in range(30):
            end = ends[np.searchsorted(ends, step, side="right")]
            for ahead in range(4):
                lost = not calm and disturbed[step : step + ahead].any()
                wanted[step, ahead] = step + ahead < end and not lost
        np.testing.assert_array_equal(found.followed(4), wanted)
    part = episodes.select(np.array([2, 0]))
    np.testing.assert_array_equal(part.followed(4), episodes.followed(4)[np.r_[8:30, 0:7]])


def test_instructions_stay_with_their_episodes(tmp_path: Path) -> None:
    made = generate(toys.SUITE, 4, seed=0, noise=0.2).episodes
    assert made.instructions == 2 * ("go left", "go right")
    assert made.select(np.array([3, 0, 1])).instructions == ("go right", "go left", "go right")
    train, held_out = made.split(0.25, 0)
    assert train.instructions is not None and held_out.instructions is not None
    assert sorted(train.instructions + held_out.instructions) == sorted(made.instructions)
    plain = Episodes(made.observation, made.action, made.ends, made.rate_hz)
    assert concatenate([made, plain]).instructions is None
    assert concatenate([made, made]).instructions == 2 * made.instructions
    with pytest.raises(DataError, match="2 instructions for 4 episodes"):
        Episodes(made.observation, made.action, made.ends, instructions=("a", "b"))
    with pytest.raises(DataError, match=r"instructions, which an \.npz file does not hold"):
        save(tmp_path / "made.npz", made)


def test_refuses_what_cannot_work(tmp_path: Path) -> None:
    recorded(tmp_path / "out", 1)
    with pytest.raises(ConfigError, match=r"holds a recording of .*'seed': 3.*, not of .*'seed': 4"):
        recorded(tmp_path / "out", 1, Order(SUITE, 4, 0.8, 16))
    (tmp_path / "out/recording.json").unlink()
    with pytest.raises(ConfigError, match="was not recorded by this command"):
        recorded(tmp_path / "out", 1)
    with pytest.raises(ConfigError, match="pixels"):
        Order(SUITE, 0, 0.0, -1)
    with pytest.raises(ConfigError, match="no scripted expert"):
        recorded(tmp_path / "new", 1, Order("kitchen", 0, 0.0, 0))
    assert not (tmp_path / "new").exists()
    with pytest.raises(DataError, match="expert of 'left' succeeded in none of 10 episodes; use less noise than 0"):
        recorded(tmp_path / "hopeless", 1, Order(f"{toys.__name__}:HOPELESS", 0, 0.0, 0))


def test_what_only_the_simulator_knows_is_recorded_on_request(tmp_path: Path) -> None:
    pytest.importorskip("metaworld")
    recorded(tmp_path, 1, Order("metaworld/reach-v3", 0, 0.0, 0, privileged=True))
    found = read(tmp_path)
    assert set(found.observation) == {"state", "privileged.scene"}
    goals = found.numbers("privileged.scene")[:, -3:]
    assert np.ptp(goals, axis=0).max() == 0.0 and np.abs(goals).max() > 0.05
    assert set(convert_to_task(load_task("metaworld/reach-v3"), found, "here").observation) == set(found.observation)
    with pytest.raises(ConfigError, match="has no privileged observations; leave out --privileged"):
        Order(SUITE, 0, 0.0, 16, privileged=True).task()


def test_without_frames_nothing_is_drawn(tmp_path: Path) -> None:
    recorded(tmp_path, 1, Order(SUITE, 0, 0.0, 0))
    assert read(tmp_path).cameras == ()
