"""The learned gate of a chunk pair: a small VQ draft of demonstrations in front of a flow policy, on PushT.

Run: OMP_NUM_THREADS=1 python benchmarks/chunk_gate.py --data path/to/demonstrations

The pair is `pusht#draft` and `pusht-flow`, 4 actions of a chunk executed. Its head is trained on states of the gated
pair. Then a rate of 0.4, seed 1, all methods on the same episodes, `random_learned` at the learned gate's rate and with
its forced steps; and the rank correlation of the scores of this gate and of the deviation with the distance of the
target's actions from the drafted ones, on the held-out demonstrations. Run folders are written to runs/chunk-gate and
are resumable; the result is written to benchmarks/results/chunk_gate.json.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import tyro
from study import RESULTS, ROOT

from specact.cli.offline import Demonstrations
from specact.cli.output import progress_bars
from specact.families.chunks import PairSettings, load_chunk_pair, make_pair
from specact.families.head import HEAD
from specact.gates.settings import BUNDLE_DEFAULTS
from specact.lab.evaluation.evaluation import Evaluation
from specact.lab.evaluation.offline import calibrate_offline
from specact.lab.evaluation.run import evaluate
from specact.lab.rollout.distillation import collector
from specact.lab.rollout.pool import Pool
from specact.lab.train.head import DISTANCE, train_head

RATE, SEED, EPISODES = 0.4, 1, 100
LESSONS = 3000
METHODS = ("draft", "hybrid", "random_learned", "learned")


def main(data: Path, workers: int | None = None) -> None:
    """Trains, evaluates and prints.

    Args:
        data: folder of the demonstrations, as for recipes/flow-pusht.toml.
        workers: processes; one per core if not given.
    """
    folder = ROOT / "runs" / "chunk-gate"
    path = folder / "pair"
    if not path.exists():
        make_pair(path, "pusht#draft", "pusht-flow", PairSettings(execute=4, env="pusht"))
    pair = load_chunk_pair(path)
    result: dict[str, Any] = {}
    with Pool(workers) as pool, progress_bars() as update:
        if not (path / HEAD).is_file():
            train_head(pair, DISTANCE, collector(LESSONS, pool, update), path / "gate", update)
            shutil.rmtree(path / "gate")
        demonstrations = Demonstrations(data, ROOT / "recipes" / "flow-pusht.toml").split(pair)[1]
        result["along demonstrations"] = {
            gate: calibrate_offline(
                pair, BUNDLE_DEFAULTS.settings(gate, pair), RATE, demonstrations, pool, update, seed=SEED
            ).model
            for gate in ("learned", "deviation")
        }
        evaluation = Evaluation(
            bundle=str(path), env=None, methods=METHODS, episodes=EPISODES, seed=SEED, rate=RATE,
            calibration_episodes=10,
        )  # fmt: skip
        summary = evaluate(evaluation, folder / "eval", update, pool, command="python benchmarks/chunk_gate.py")
    result["demonstrations"] = len(demonstrations)
    result |= {name: summary[name] for name in ("episodes", "seed", "rate", "contrasts")}
    keys = ("success", "score", "transmission_rate", "action_change_loss", "cost")
    result["methods"] = {name: {key: row[key] for key in keys} for name, row in summary["methods"].items()}
    (RESULTS / "chunk_gate.json").write_text(json.dumps(result, indent=2) + "\n")
    print(markdown(result))


def markdown(result: dict[str, Any]) -> str:
    """The table of the methods, their contrasts and the rank correlations."""
    lines = [
        "| method | sent | success [95 %] | score | change by skipping | head: parameters, ms | gate, ms |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in result["methods"].items():
        success, cost, change = row["success"], row["cost"], row["action_change_loss"]
        lines.append(
            f"| {name} | {row['transmission_rate']:.3f} | {success['rate']:.3f} [{success['low']:.3f}, "
            f"{success['high']:.3f}] | {row['score']['mean']:.3f} | "
            f"{'-' if change is None else f'{change:.3f}'} | {cost['head_parameters']}, {cost['head_ms']:.3f} | "
            f"{cost['gate_ms']:.3f} |"
        )
    for row in result["contrasts"]:
        lines += [
            f"{row['first']} - {row['second']}, {measure}: {tested['difference']:+.3f} [{tested['low']:+.3f}, "
            f"{tested['high']:+.3f}], p = {tested['p_holm']:.2g}"
            for measure in ("success", "score")
            if (tested := row.get(measure)) is not None
        ]
    for gate, model in result["along demonstrations"].items():
        lines.append(f"{gate}: Spearman {model['spearman']:+.3f} with the distance, along held-out demonstrations")
    return "\n".join(lines)


if __name__ == "__main__":
    tyro.cli(main)
