"""The learned gate's head as the draft: without a gate, and verified by chance; it needs no transmission to be good."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.tiny import quiet

pytest.importorskip("mujoco")

from specact import Pair
from specact.errors import ConfigError
from specact.gates.learned import HeadDraft, TargetHead
from specact.gates.settings import GateSettings
from specact.lab.envs import load_task
from specact.lab.evaluation.run import Evaluation, evaluate, read_gates, read_table
from specact.lab.rollout.methods import load_method
from specact.lab.rollout.pool import Pool
from specact.lab.rollout.rollout import Shard, run_shard
from specact.lab.rollout.steps import OBSERVATION
from specact.observation import ObservationHistory, Window

DRAFT_MS, HEAD_MS, GATE_MS, TARGET_MS = 2.0, 1.0, 0.5, 11.0
METHODS = ("draft", "head_draft", "head_random", "learned", "random_learned")


def windows(bundle: Pair[Any]) -> list[Window]:
    samples = []
    env = load_task("ball").make()
    for seed in range(4):
        observation, _ = env.reset(seed=seed)
        samples.append(ObservationHistory(bundle.parts.spec.observation).push(observation))
    env.close()
    return samples


def test_it_proposes_what_the_head_expects_with_the_drafts_offsets(ball: Pair[Any]) -> None:
    head, seen = TargetHead.of(ball), windows(ball)
    batch = HeadDraft(ball.parts.draft, head).infer_batch(seen)
    for window, proposal in zip(seen, batch, strict=True):
        draft = ball.parts.draft.infer(window)
        np.testing.assert_allclose(proposal.probs, head.estimate(window, draft), atol=1e-5)
        np.testing.assert_allclose(proposal.probs.sum(axis=-1), 1.0, atol=1e-12)
        np.testing.assert_allclose(proposal.offsets, draft.offsets, atol=1e-5)
        np.testing.assert_allclose(proposal.probs, HeadDraft(ball.parts.draft, head).infer(window).probs, atol=1e-5)
        assert np.abs(proposal.probs - draft.probs).max() > 0.01, "draft and head agree so well that nothing is tested"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("heads") / "run"
    what = Evaluation(
        "ball", None, METHODS, 10, seed=3, rate=0.4, draft_ms=DRAFT_MS, head_ms=HEAD_MS, gate_ms=GATE_MS,
        target_ms=TARGET_MS,
    )  # fmt: skip
    return folder, evaluate(what, folder, quiet, Pool(1))


def test_what_is_rejected_is_judged_by_the_heads_distribution(
    ball: Pair[Any], made: tuple[Path, dict[str, Any]]
) -> None:
    """With p^ in the place of q the acceptance rule is exact for the target: the log says p against p^."""
    gate = GateSettings("random", threshold=0.5, options=(("force_first", True),))
    shard = Shard.of(ball, "ball", load_method("head_random"), gate, (0, 1), 3)
    _, table = run_shard(replace(shard, learning=True))
    assert len(table["step"]) > 10
    head = TargetHead.of(ball)
    for row in range(len(table["step"])):
        window = Window({name: table[OBSERVATION + name][row] for name in ("state", "goal")})
        estimate, target = head.estimate(window, ball.parts.draft.infer(window)), table["target_probs"][row]
        np.testing.assert_allclose(table["draft_probs"][row], estimate, atol=1e-4)
        for k in range(2):
            code = table[f"drafted_{k}"][row]
            kept = min(1.0, target[k, code] / estimate[k, code])
            assert table[f"rejection_{k}"][row] == pytest.approx(1.0 - kept, abs=1e-3)
        if not table["transmitted"][row]:
            assert all(table[f"executed_{k}"][row] == table[f"drafted_{k}"][row] for k in range(2))


def test_the_head_is_part_of_what_a_method_costs(ball: Pair[Any], made: tuple[Path, dict[str, Any]]) -> None:
    folder, summary = made
    with_head_ms = DRAFT_MS + HEAD_MS
    for name, draft_ms in (("draft", DRAFT_MS), ("head_draft", with_head_ms), ("head_random", with_head_ms)):
        np.testing.assert_allclose(read_table(folder / "steps" / name)["draft_s"], draft_ms / 1e3)
    head = ball.parts.manifest.parameters["head"]
    costs = {name: summary["methods"][name]["cost"] for name in METHODS}
    for name in METHODS:
        used = name not in ("draft", "random_learned")
        assert (costs[name]["head_parameters"], costs[name]["head_ms"]) == ((head, HEAD_MS) if used else (0, 0.0))
    assert costs["head_draft"]["target_parameters"] == 0 < costs["head_random"]["target_parameters"]


def test_chance_has_the_rate_and_the_first_step_of_the_learned_gate(made: tuple[Path, dict[str, Any]]) -> None:
    folder, summary = made
    achieved = summary["methods"]["learned"]["sent"]
    for name in ("random_learned", "head_random"):
        gate = read_gates(folder)[name]
        assert gate.max_skips is None
        assert dict(gate.options) == {"force_first": True}
        steps = read_table(folder / "steps" / name)
        assert steps["transmitted"][steps["step"] == 0].all()
        error = np.sqrt(achieved * (1 - achieved) / len(steps["step"]))
        assert abs(steps["transmitted"].mean() - achieved) < 5 * error


def test_a_bundle_without_a_head_is_a_sentence(tiny_bundle: Path, tmp_path: Path) -> None:
    what = Evaluation(str(tiny_bundle), None, ("head_draft",), 1)
    with pytest.raises(ConfigError, match="has no learned gate; train one with"):
        evaluate(what, tmp_path / "run", quiet, Pool(1))
    assert not (tmp_path / "run").exists()


def test_a_run_is_not_resumed_with_another_head(tmp_path: Path) -> None:
    what = Evaluation("ball", None, ("head_draft",), 1)
    evaluate(what, tmp_path, quiet, Pool(1))
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    manifest["evaluation"]["head"] = "another"
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ConfigError, match="holds another run"):
        evaluate(what, tmp_path, quiet, Pool(1))
