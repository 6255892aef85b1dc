"""ONNX Runtime against PyTorch's inference mode: same weights, batch 1, one thread, interleaved in one process.

Run: python benchmarks/engines.py
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

import torch

from specact.families.codes.policy import OnnxPolicy, PolicySpec
from specact.lab.train.attention import unknown
from specact.lab.train.codes import export_policy, policy_graph
from specact.lab.train.recipe import CodesRecipe, load_recipe
from specact.lab.train.vqbet import Shapes, VQBeT
from specact.observation import Window, vectors

RECIPES = Path(__file__).parents[1] / "recipes"
# State, goal and action widths of the environments; weights are random, which does not affect the time.
WIDTHS = {"ball": (8, 2, 2), "swarm": (20, 10, 10), "pusht": (26, 0, 2), "kitchen": (30, 7, 9)}
ROUNDS, CALLS = 30, 20


def main() -> None:
    torch.set_num_threads(1)
    print(f"median of {ROUNDS * CALLS} calls, batch 1, one thread, ms")
    print(f"{'policy':16} {'parameters':>10} {'PyTorch':>8} {'ONNX Runtime':>13} {'ratio':>6}")
    for env, widths in WIDTHS.items():
        recipe = load_recipe(RECIPES / f"{env}.toml", CodesRecipe)
        for role in ("draft", "target"):
            model = build(recipe, role, *widths)
            torch_ms, onnx_ms = compare(model, recipe)
            count = sum(p.numel() for p in model.parameters())
            print(f"{env + ' ' + role:16} {count:10,} {torch_ms:8.3f} {onnx_ms:13.3f} {torch_ms / onnx_ms:6.2f}")


def build(recipe: CodesRecipe, role: str, state: int, goal: int, actions: int) -> VQBeT:
    torch.manual_seed(0)
    tokenizer = recipe.tokenizer
    seen = vectors(recipe.window, goal, state=state)
    shapes = Shapes(seen, tokenizer.codebooks, tokenizer.codes, recipe.chunk, actions, recipe.goal)
    return VQBeT(shapes, recipe.policies[role], unknown(seen.fields)).eval()


def compare(model: VQBeT, recipe: CodesRecipe) -> tuple[float, float]:
    """Median milliseconds of a device's complete call, from window to distribution, in both engines."""
    shapes = model.shapes
    spec = PolicySpec(
        shapes.observation, shapes.observation, shapes.codebooks, shapes.codes, shapes.chunk, shapes.actions,
        recipe.execute, recipe.overlap, 1.0, 10.0, model.secondary_head is not None,
    )  # fmt: skip
    example = policy_graph(model).example(1)["observation"]
    window = Window({name: values[0].numpy() for name, values in example.items()})
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "policy.onnx"
        export_policy(model, path)
        runtime = OnnxPolicy(path, spec, spec.target)

    def in_torch() -> None:
        # The complete call with PyTorch: wrap the arrays, infer, softmax, and convert the result to NumPy.
        seen = {name: torch.from_numpy(values)[None] for name, values in window.arrays.items()}
        with torch.inference_mode():
            logits, offsets = model(seen)[:2]
            logits.double().softmax(-1)[0].numpy(), offsets[0].numpy()

    def in_onnx() -> None:
        runtime.infer(window)

    times: dict[str, list[float]] = {"torch": [], "onnx": []}
    for _ in range(ROUNDS):
        for name, call in (("torch", in_torch), ("onnx", in_onnx)):
            for _ in range(CALLS):
                start = time.perf_counter()
                call()
                times[name].append(1e3 * (time.perf_counter() - start))
    return statistics.median(times["torch"]), statistics.median(times["onnx"])


if __name__ == "__main__":
    main()
