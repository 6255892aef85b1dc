"""A bundle with a slower target: the same answers, another fingerprint."""

from pathlib import Path

import numpy as np

from specact import load_bundle
from specact.lab.train.heavy import make_heavy_target
from specact.observation import Window


def test_a_heavy_target_answers_as_the_target_and_computes_more(tiny_bundle: Path, tmp_path: Path) -> None:
    bundle = load_bundle(tiny_bundle)
    make_heavy_target(bundle, tmp_path / "heavy", layers=2, width=32, heads=2)
    heavy = load_bundle(tmp_path / "heavy")
    rng, spec = np.random.default_rng(0), bundle.spec
    windows = [
        Window(
            {
                name: rng.normal(size=field.window_shape).astype(np.float32)
                for name, field in bundle.observation.fields.items()
            }
        )
        for _ in range(3)
    ]
    for ours, theirs in zip(heavy.target.infer_batch(windows), bundle.target.infer_batch(windows), strict=True):
        np.testing.assert_array_equal(ours.probs, theirs.probs)
        np.testing.assert_array_equal(ours.offsets, theirs.offsets)
    assert heavy.spec == spec and heavy.tokenizer.fingerprint == bundle.tokenizer.fingerprint
    assert heavy.fingerprint != bundle.fingerprint
    sizes = [(made.path / "target.onnx").stat().st_size for made in (heavy, bundle)]
    assert sizes[0] > sizes[1] + 4 * 2 * 12 * 32**2  # two layers of 12 width^2 weights
    assert [path.name for path in sorted((tmp_path / "heavy").iterdir())] == [
        "draft.onnx", "manifest.json", "target.onnx", "tokenizer.safetensors",
    ]  # fmt: skip
