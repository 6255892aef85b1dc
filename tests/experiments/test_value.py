"""The value oracle: copies are exact, branches share streams, known values are recovered, chance gains nothing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from experiments.controller import AUDIT_RATE
from experiments.value.branches import BaseGate, Branchable, above, begin, differences, outcomes, robots_of, to_end
from experiments.value.heads import all_of, geometry, schedule, summary
from experiments.value.settings import CAMERA, FIXED, SCENE, UNKNOWN, Unlisted, Weak, Weakest, fails, noticed, skips
from experiments.value.tables import ORACLE, bound, closed_loop, gain, split_gain
from experiments.value.targets import KNOWN, METAWORLD, TASKS, report

from specact.lab.envs import load_task
from specact.lab.envs.metaworld import INSTRUCTIONS
from specact.lab.rollout.families import FamilyRollout, rollout_of
from specact.lab.rollout.methods import HYBRID
from specact.lab.rollout.rollout import control_step
from specact.lab.rollout.timed import Prepared
from specact.lab.train.recipe import load_recipe
from specact.load import load_pair
from specact.rng import Role, stream
from specact.types import StepRecord

CHUNKS, VALUES = 4, (0.0, 0.5, -0.3, 0.0)


@pytest.fixture(scope="module")
def family() -> FamilyRollout:
    return rollout_of(load_pair("ball"), HYBRID)


@dataclass
class Known:
    """An episode that succeeds with probability 0.4, plus the value of every inference that asked."""

    gate: BaseGate
    execute: int
    seen: Any
    policy: Any = None
    steps: int = 0
    chance: float = 0.4
    success: bool = False

    @property
    def done(self) -> bool:
        return self.steps >= CHUNKS * self.execute

    def observe(self) -> Any:
        return self.seen

    def act(self, action: Any) -> None:
        inference, first = divmod(self.steps, self.execute)
        if not first and self.gate.transmitted:  # type: ignore[attr-defined]
            self.chance += VALUES[inference]
        self.steps += 1
        seed, robot, episode, _ = self.policy.address
        self.success = float(stream(seed, Role.ENVIRONMENT, robot=robot, episode=episode).random()) < self.chance


class Noted(BaseGate):
    """The base gate, which notes what it decided last."""

    transmitted = False

    def on_inference(self, record: StepRecord) -> None:
        self.transmitted = record.decision.transmit


def known(family: FamilyRollout, episode: int) -> Branchable:
    observation = {"state": np.zeros(8, np.float32), "goal": np.zeros(2, np.float32)}
    gate = Noted(0.0)
    world = Known(gate, family.pair.execute, observation)
    robot = begin(family, world, gate, (Prepared[Any](), Prepared[Any]()), 0, episode)
    world.policy = robot.policy
    return robot


@pytest.mark.parametrize("inference", [0, 1, 2])
def test_known_values_are_recovered(family: FamilyRollout, inference: int) -> None:
    robots = [known(family, episode) for episode in range(50)]
    for _ in range(inference * family.pair.execute):
        control_step(robots, family)
    values = differences(outcomes(robots, family, 4))
    # The error is at most 0.5 / sqrt(200); beyond five of them is one run in a million, and seeds are fixed.
    assert abs(values.mean() - VALUES[inference]) < 5 * 0.5 / np.sqrt(values.size)
    # With common random numbers asking never turns a draw against its own value.
    assert (values * np.sign(VALUES[inference]) >= 0).all()
    if not VALUES[inference]:
        assert not values.any(), "both branches have the same streams"


def test_independent_streams_would_add_variance(family: FamilyRollout) -> None:
    robots = [known(family, episode) for episode in range(50)]
    ends = {}
    for seed in (1, 2):
        branches = [robot.branch(False, seed) for robot in robots]
        control_step(branches, family)
        for branch in branches:
            branch.policy.address = branch.policy.address._replace(seed=seed)
        to_end(branches, family)
        ends[seed] = np.array([float(branch.world.success) for branch in branches])  # type: ignore[attr-defined]
    assert (ends[1] - ends[2]).any(), "the same decision, other streams: a difference without value"


@pytest.mark.parametrize("name", ["ball", "relocate"])
def test_a_copy_continues_bit_for_bit(name: str) -> None:
    family = rollout_of(load_pair(name), HYBRID)
    (robot,) = robots_of(family.pair, 0.4, 0, [3], family)
    for _ in range(12):
        control_step([robot], family)
    copied, left = robot.copy(), robot.copy()
    ends = []
    for continued in (robot, copied):
        actions = []
        while not continued.world.done:
            control_step([continued], family)
            simulator = getattr(continued.world.env, "_sim", continued.world.env)
            actions.append((simulator.data.qpos.copy(), continued.policy.record.decision))
        ends.append((actions, continued.world.success, continued.policy.address))
    for (state, decision), (state_again, decision_again) in zip(ends[0][0], ends[1][0], strict=True):
        assert (state == state_again).all() and decision == decision_again
    assert ends[0][1:] == ends[1][1:] and left.world.steps == 12, "copies do not share what an episode changes"


def test_only_a_choice_by_value_gains() -> None:
    rng = np.random.default_rng(0)
    true = rng.choice([0.0, 0.5], size=4000, p=[0.8, 0.2])
    values = (rng.random((4000, 8)) < true[:, None]).astype(float)
    best = 10 * 0.8 * 0.2 * 0.5  # a gate at 0.2 that knows them
    assert gain(true, true, 0.2, 10) == pytest.approx(best, rel=0.05)
    assert 0.9 * best < split_gain(values, values, 0.2, 10) <= 1.1 * best
    shuffled = [split_gain(rng.permutation(values), values, 0.2, 10) for _ in range(20)]
    assert abs(np.mean(shuffled)) < 0.05 * best and best <= 1.05 * bound(values, 0.2, 10)
    # Chosen and valued on the same continuations noise alone would seem to gain.
    noise = rng.choice([-1.0, 0.0, 1.0], size=(4000, 8))
    naive = gain(noise.mean(1), noise.mean(1), 0.2, 10)
    assert naive > 0.3 and abs(split_gain(noise, noise, 0.2, 10)) < 0.15 and bound(noise, 0.2, 10) < 0.5


def test_ties_do_not_choose_by_the_order_of_states() -> None:
    early = np.arange(100.0)[::-1]  # whoever asks first would gain
    assert gain(np.zeros(100), early, 0.2, 10) == pytest.approx(0.0)
    assert gain(early, early, 0.2, 10) > 0


def test_a_threshold_asks_above_it_and_at_it_with_its_probability() -> None:
    assert [above(score, (0.5, 0.25), 0.3) for score in (0.4, 0.5, 0.6)] == [False, False, True]
    assert above(0.5, (0.5, 0.25), 0.2)


def test_an_order_or_a_score_decides_instead_of_chance_and_leaves_copies_to_it(family: FamilyRollout) -> None:
    robots = robots_of(family.pair, 0.0, 0, range(4), family)
    for robot, threshold in zip(robots, (None, -1.0, 2.0, None), strict=True):
        robot.gate.by = lambda known, rng: float(known["past"][0])
        robot.gate.cut = None if threshold is None else (threshold, 0.0)
    robots[3].gate.order = True
    records, *_ = control_step(robots, family)
    assert [record.decision.transmit for record in records] == [False, True, False, True]
    assert [robot.gate.past.tolist() for robot in robots[2:]] == [[1, 0, 1], [1, 1, 0]]


def test_parts_of_the_greedy_gate_are_one_and_every_gate_meets_its_rivals() -> None:
    part, rest = ({"won": won, "asked": requests, "inferences": 10} for won, requests in (("10", 2), ("11", 4)))
    gates: dict[str, Any] = {ORACLE: {"0": part, "1": rest}, "random": {"won": "0011", "asked": 6, "inferences": 20}}
    tests, rows = closed_loop({"0.1": gates | {"learned": gates["random"]}})
    assert (rows[0]["gate"], rows[0]["success"]["mean"], rows[0]["asked"]) == (ORACLE, 0.75, 0.3)
    assert [(test["first"], test["second"]) for test in tests] == [
        (ORACLE, "random"), (ORACLE, "learned"), ("learned", "random"),
    ]  # fmt: skip
    seeds = {"0": gates["random"], "1": gates["random"] | {"won": "1111"}}
    tests, rows = closed_loop({"0.1": gates | {"value head": seeds, "time head": gates["random"]}})
    assert rows[2]["success"]["mean"] == 0.75 and ("value head", "time head") in [
        (test["first"], test["second"]) for test in tests
    ]


def test_a_head_finds_a_value_that_its_inputs_tell_and_a_shuffled_one_does_not() -> None:
    rng = np.random.default_rng(0)
    past = rng.integers(20, size=(600, 3)).astype(float)
    rows = {"past": past, "episode": np.arange(600) // 6, "value": (past[:, 1] > 15) * 0.5 + 0.1 * rng.normal(size=600)}
    rows |= {"scores": rng.normal(size=(600, 4)), "asked": past[:, 0] == 3.0}
    head = all_of("summary")
    correlations = {name: np.corrcoef(head[name].held_out(rows), rows["value"])[0, 1] for name in list(head)[:4]}
    assert correlations["value head"] > 0.6 and correlations["history head"] > 0.6
    assert abs(correlations["shuffled head"]) < 0.25 and abs(correlations["time head"]) < 0.25
    assert np.allclose(schedule(rows), np.arange(20) == 3)
    assert head["value head"].fit(rows, 1)(summary(rows)[:1]).shape == (1,)


def test_the_geometry_of_a_swarm_is_in_order() -> None:
    position = np.array([[0.0, 0.0], [0.3, 0.4], [1.0, 0.0]])
    features = geometry(np.concatenate([position, 0.5 * position, 0.0 * position]).reshape(1, -1))
    assert np.allclose(features, [[0.0, 0.5, 1.0, 0.0, 0.25, 0.5, 0.5, np.sqrt(0.65), 1.0]])


def test_a_list_of_tasks_asks_on_those_that_the_draft_was_not_trained_on() -> None:
    gate = Unlisted.for_pair(None, 0.0)
    for number, task in enumerate(TASKS):
        assert load_task(METAWORLD.name).start(7919, number) % len(TASKS) == number
        proposal = SimpleNamespace(window=SimpleNamespace(instruction=INSTRUCTIONS[task]))
        assert gate.decide(proposal, np.random.default_rng(0)).transmit == (task not in KNOWN)  # type: ignore[arg-type]


def test_lists_of_where_the_draft_fails_are_rivals_of_gates_and_ask_there_first() -> None:
    rng, scores = np.random.default_rng(0), dict[tuple[type, str], float]()
    for kind in (Weak, Weakest):
        for task in TASKS:
            proposal = SimpleNamespace(window=SimpleNamespace(instruction=INSTRUCTIONS[task]))
            scores[kind, task] = kind(0.0).score(proposal, rng)  # type: ignore[arg-type]
    listed = {task for task in TASKS if INSTRUCTIONS[task] in fails()}
    assert all((scores[kind, task] > 0.1) >= (task in listed) for kind, task in scores)
    assert all(scores[Weakest, task] <= scores[Weakest, "pick-place-v3"] for task in TASKS)
    assert {task for task in TASKS if scores[Weak, task] > 1.0} == listed
    cell = {"asked": [0.5, 0.5], "sent": 0.5, "auroc": 0.5}
    gated = {name: {**cell, "won": "10" * 10} for name in ("draft", "random_learned", "learned", "weakest")}
    _, contrasts = report(SCENE, {"0.4": gated}).tables
    rivals = {row["second"] for row in contrasts.rows if row["first"] == "learned 0.4"}
    assert rivals == {"random_learned 0.4", "draft", "weakest 0.4"}


def test_a_setting_trains_what_it_says(tmp_path: Path) -> None:
    both, recipes = ["image.corner2", "image.gripper", "state"], dict[str, Any]()
    texts = {"unknown": UNKNOWN.recipe, "scene": SCENE.recipe, "taught": SCENE.taught, "camera": CAMERA.recipe}
    texts["object"] = FIXED.recipe
    for name, text in texts.items():
        (tmp_path / name).write_text(f"seed = 1\n{text}")
        recipes[name] = load_recipe(tmp_path / name)
    sees = {name: list(recipe.sees) for name, recipe in recipes.items()}
    assert sees.pop("object") == ["image.wrist", "state"] and list(recipes["object"].data) == ["libero-object"]
    assert sees.pop("camera") == both[1:] and sees.pop("scene") == ["state", "privileged.scene"]
    assert sees == {"unknown": both, "taught": both}
    assert list(recipes["unknown"].data) == [f"metaworld-{task}" for task in KNOWN]
    assert {tuple(recipes[name].data) for name in ("scene", "taught", "camera")} == {("metaworld-scene",)}


def test_success_of_known_and_of_other_tasks_stands_apart() -> None:
    cell = {"asked": [0.0, 1.0], "sent": 0.5, "auroc": 1.0}
    always, never = {**cell, "won": "1111" * 5}, {**cell, "won": "1010" * 5}
    gated = {"draft": never, "random": never, "adahi": always}
    cells = {"draft": {"tasks": []}, "one step": {"target_on_device": always}, "0.4": gated}
    study = report(UNKNOWN, cells)
    shown, contrasts = study.tables
    assert [row["method"] for row in shown.rows] == ["one step", "draft", "random 0.4", "adahi 0.4"]
    assert study.facts["draft"]["known"]["mean"] == 1.0 and study.facts["draft"]["other"]["mean"] == 0.0
    rivals = {row["second"]: row["difference"] for row in contrasts.rows if row["first"] == "adahi 0.4"}
    assert rivals == {"random 0.4": 0.5, "draft": 0.5, "one step": 0.0}
    assert study.facts["random 0.4 - draft"]["difference"] == 0.0
    facts = report(UNKNOWN, cells | {"0.4-1": {"draft": never, "adahi": never}}).facts
    assert facts["adahi 0.4"]["success"]["mean"] == 0.75, "the mean of both trainings"
    assert facts["adahi 0.4 - draft"]["difference"] == 0.25
    assert facts["adahi 0.4 - random 0.4"]["difference"] == 0.5, "of the training that both have"


def test_an_alarm_notices_tasks_whose_drafts_are_not_kept_and_no_others() -> None:
    episode, rng = np.repeat(np.arange(200), 10), np.random.default_rng(0)
    transmitted, prefix = rng.random(2000) < 0.4, np.where(rng.random(2000) < 0.75, 4, 3)
    steps = {"episode": episode, "transmitted": transmitted, "prefix": prefix, "distance": np.ones(2000)}
    known, unknown = skips({**steps, "prefix": np.where(episode % 2 == 0, prefix, 0)})
    assert abs(known["kept"].mean() - 0.75) < 0.06 and not unknown["kept"].any()
    assert len(known["kept"]) == (~transmitted)[episode % 2 == 0].sum() and unknown["each"] == 10.0
    alarm = noticed(known, unknown, level=known["kept"].mean())
    assert alarm["false"] <= 5 and alarm["audits"][1] < 20
    assert alarm["inferences"] == alarm["audits"][0] / AUDIT_RATE / unknown["share"]
    assert noticed(*skips(steps), level=known["kept"].mean(), most=1000)["audits"][0] > 10 * alarm["audits"][1]
    assert noticed(unknown, known, level=0.75)["false"] == 100, "before the change"
