"""Demonstrations of an expert: what is read is what was shown, by any number of processes, and in spite of any stop."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from tests.lab import toys

from specact.errors import ConfigError, DataError
from specact.lab.data import lerobot_writing
from specact.lab.data.checks import convert_to_task, describe
from specact.lab.data.episodes import Episodes, concatenate
from specact.lab.data.generate import Order, demonstrate, generate, record
from specact.lab.data.lerobot_writing import Written
from specact.lab.data.readers import read
from specact.lab.envs import load_task
from specact.lab.rollout.pool import Pool

BALL = load_task("ball")
SUITE = f"{toys.__name__}:SUITE"
ORDER = Order(SUITE, seed=3, noise=0.8, pixels=16)


@pytest.mark.parametrize("name", ["ball", "swarm"])
def test_generated_episodes_replay_to_success_and_repeat(name: str) -> None:
    task, told = load_task(name), list[int]()
    made = generate(task, 2, 4, 0.0, told.append)
    assert len(made) == 2 and told == [1, 2] and made.rate_hz == task.rate_hz
    env, seeds = task.make(), (np.random.default_rng([4, number]).integers(2**31, size=2)[0] for number in range(20))
    for steps in made.slices():
        for seed in seeds:  # a try that failed, which is rare, has no episode
            observation, info = env.reset(seed=int(seed))
            if np.array_equal(observation["state"], made.numbers("state")[steps.start]):
                break
        for state, action in zip(made.numbers("state")[steps], made.action[steps], strict=True):
            assert not info["success"]
            np.testing.assert_array_equal(observation["state"], state)
            observation, _, _, _, info = env.step(action)
        assert info["success"] and info["score"] == 1.0
    repeat = generate(task, 2, 4, 0.0)
    np.testing.assert_array_equal(made.action, repeat.action)


def test_failed_episodes_are_dropped_and_an_expert_that_hardly_succeeds_is_refused() -> None:
    # About half of the episodes take longer.
    made = generate(dataclasses.replace(BALL, max_steps=61), 3, seed=0, noise=0.0)
    assert len(made) == 3 and np.diff(made.ends, prepend=0).max() <= 61
    with pytest.raises(ConfigError, match="no scripted expert"):
        generate(dataclasses.replace(BALL, expert=None), 1, seed=0, noise=0.0)
    with pytest.raises(DataError, match="only 0 of 10"):
        generate(dataclasses.replace(BALL, max_steps=5), 1, seed=0, noise=0.0)


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
    made = demonstrate(task, task.make(), np.random.default_rng([3, number, 0]), 0.8, number)
    assert made is not None
    return made


def test_what_is_read_is_what_was_shown(tmp_path: Path) -> None:
    made = recorded(tmp_path / "out")
    wanted = concatenate([shown(number) for number in range(6)])
    dataset = read(tmp_path / "out")
    assert made == Written(dataset.steps, {"go left": 3, "go right": 3}, {"go left": 3, "go right": 3})
    assert set(dataset.observation) == {"state", "image.top"} and dataset.rate_hz == 20.0
    assert dataset.disturbed is not None and wanted.disturbed is not None
    for values, expected in (
        (dataset.ends, wanted.ends), (dataset.action, wanted.action), (dataset.disturbed, wanted.disturbed),
        (dataset.numbers("state"), wanted.numbers("state")),
        (dataset.frames("image.top")[:], wanted.frames("image.top")[:]),
    ):  # fmt: skip
        np.testing.assert_array_equal(values, expected)
    assert dataset.instructions == wanted.instructions == 3 * ("go left", "go right")
    fitted = convert_to_task(toys.SUITE, dataset, "here")
    assert fitted.cameras == ("image.top",) and fitted.instructions == dataset.instructions
    assert not [warning for warning in describe(dataset, tmp_path / "out")["warnings"] if "cannot be read" in warning]


def test_is_a_lerobot_dataset_with_the_statistics_of_all_frames(tmp_path: Path) -> None:
    """By the columns and files that LeRobot's own loader looks for."""
    recorded(tmp_path)
    info, stats = (json.loads((tmp_path / f"meta/{name}.json").read_text()) for name in ("info", "stats"))
    data = pq.read_table(tmp_path / "data/chunk-000/file-000.parquet")
    episodes = pq.read_table(tmp_path / "meta/episodes/chunk-000/file-000.parquet").to_pylist()
    assert info["codebase_version"] == "v3.0" and info["fps"] == 20 and info["total_frames"] == len(data)
    assert set(info["features"]) == set(data.column_names)
    assert info["features"]["observation.images.top"]["shape"] == [16, 16, 3]
    assert data.column("index").to_pylist() == list(range(len(data)))
    lengths = [row["length"] for row in episodes]
    ends = np.cumsum(lengths).tolist()
    assert [row["dataset_to_index"] for row in episodes] == ends
    assert [row["dataset_from_index"] for row in episodes] == [0, *ends[:-1]]
    assert [row["tasks"] for row in episodes] == 3 * [["go left"], ["go right"]]
    tasks = pq.read_table(tmp_path / "meta/tasks.parquet")
    assert (tasks["task"].to_pylist(), tasks["task_index"].to_pylist()) == (["go left", "go right"], [0, 1])
    assert json.loads(tasks.schema.metadata[b"pandas"])["index_columns"] == ["task"]
    by_frame = [number % 2 for number, length in enumerate(lengths) for _ in range(length)]
    assert data["task_index"].to_pylist() == by_frame
    groups = pq.ParquetFile(tmp_path / "data/chunk-000/file-000.parquet").metadata
    assert [groups.row_group(k).num_rows for k in range(groups.num_row_groups)] == lengths
    dataset = read(tmp_path)
    pixels = dataset.frames("image.top")[:].reshape(-1, 3) / 255.0
    for values, name, shape in (
        (dataset.action.astype(np.float64), "action", (2,)),
        (pixels, "observation.images.top", (3, 1, 1)),
    ):
        for statistic in ("min", "max", "mean", "std"):
            kept = np.array(stats[name][statistic])
            assert kept.shape == shape
            np.testing.assert_allclose(kept.ravel(), getattr(values, statistic)(axis=0), atol=1e-6)
        assert stats[name]["count"] == [dataset.steps]


def test_a_recording_that_was_stopped_goes_on_as_one_of_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped after some episodes, and then while they are put together; other processes go on."""

    def stopped(work: Callable[[int], None], numbers: Iterable[int]) -> Iterator[tuple[int, None]]:
        yield from one_by_one(work, [*numbers][1::2])
        raise KeyboardInterrupt

    recorded(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        record(ORDER, tmp_path / "stopped", 3, stopped, lambda *_: None)
    assert len([*tmp_path.glob("stopped/parts/*.parquet")]) == 3
    with monkeypatch.context() as patch, Pool(2) as pool:
        patch.setattr(lerobot_writing, "_pooled", lambda *_: 1 / 0)  # between the table of episodes and info.json
        with pytest.raises(ZeroDivisionError):
            record(ORDER, tmp_path / "stopped", 3, pool.each, lambda *_: None)
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
    assert files(tmp_path / "grown")["meta/stats.json"] == files(tmp_path / "whole")["meta/stats.json"]
    assert recorded(tmp_path / "grown", 3).kept == {"go left": 3, "go right": 3}
    with pytest.raises(ConfigError, match="holds 6 episodes, more than the 4 wanted"):
        recorded(tmp_path / "grown", 2)


def test_noise_disturbs_what_is_done_and_not_what_is_recorded(tmp_path: Path) -> None:
    recorded(tmp_path, 20)
    dataset = read(tmp_path)
    assert dataset.disturbed is not None and dataset.instructions is not None
    assert 0.05 < dataset.disturbed.mean() < 0.6
    state = dataset.numbers("state")
    for span, told in zip(dataset.slices(), dataset.instructions, strict=True):
        expert = np.stack([toys.wanted(place, told.removeprefix("go ")) for place in state[span]])
        np.testing.assert_allclose(dataset.action[span], expert, atol=1e-5)
        moved = np.diff(state[span], axis=0)
        as_recorded = np.isclose(moved, toys.GAIN * dataset.action[span][:-1], atol=1e-5).all(axis=1)
        np.testing.assert_array_equal(as_recorded, ~dataset.disturbed[span][:-1])


def test_a_chunk_counts_up_to_its_first_disturbed_step() -> None:
    rng = np.random.default_rng(0)
    disturbed, ends = rng.random(30) < 0.3, np.array([7, 8, 30])
    zeros = np.zeros((30, 1), np.float32)
    episodes = Episodes({"state": zeros}, zeros, ends, disturbed=disturbed)
    for calm in (False, True):
        variant = Episodes(episodes.observation, episodes.action, ends) if calm else episodes
        wanted = np.zeros((30, 4), bool)
        for step in range(30):
            end = ends[np.searchsorted(ends, step, side="right")]
            for ahead in range(4):
                lost = not calm and disturbed[step : step + ahead].any()
                wanted[step, ahead] = step + ahead < end and not lost
        np.testing.assert_array_equal(variant.followed(4), wanted)
    part = episodes.select(np.array([2, 0]))
    np.testing.assert_array_equal(part.followed(4), episodes.followed(4)[np.r_[8:30, 0:7]])


def test_instructions_stay_with_their_episodes() -> None:
    made = generate(toys.SUITE, 4, seed=0, noise=0.2)
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


def test_refuses_what_cannot_work(tmp_path: Path) -> None:
    recorded(tmp_path / "out", 1, Order(SUITE, 3, 0.0, 0))
    assert read(tmp_path / "out").cameras == ()  # without frames nothing is drawn
    with pytest.raises(ConfigError, match="another run"):
        recorded(tmp_path / "out", 1, Order(SUITE, 4, 0.0, 0))
    (tmp_path / "out/recording.json").unlink()
    with pytest.raises(ConfigError, match="was not recorded by this command"):
        recorded(tmp_path / "out", 1)
    with pytest.raises(ConfigError, match="no scripted expert"):
        recorded(tmp_path / "new", 1, Order("kitchen", 0, 0.0, 0))
    assert not (tmp_path / "new").exists()
    with pytest.raises(DataError, match="expert of 'left' succeeded in none of 10 episodes; use less noise than 0"):
        recorded(tmp_path / "hopeless", 1, Order(f"{toys.__name__}:HOPELESS", 0, 0.0, 0))
    with pytest.raises(ConfigError, match="has no privileged observations; leave out --privileged"):
        Order(SUITE, 0, 0.0, 16, privileged=True).task()


def test_what_only_the_simulator_knows_is_recorded_on_request(tmp_path: Path) -> None:
    pytest.importorskip("metaworld")
    recorded(tmp_path, 1, Order("metaworld/reach-v3", 0, 0.0, 0, privileged=True))
    data = read(tmp_path)
    assert set(data.observation) == {"state", "privileged.scene"}
    goals = data.numbers("privileged.scene")[:, -3:]
    assert np.ptp(goals, axis=0).max() == 0.0 and np.abs(goals).max() > 0.05
    assert set(convert_to_task(load_task("metaworld/reach-v3"), data, "here").observation) == set(data.observation)
