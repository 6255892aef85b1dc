"""A token policy: its bins, its chunks, here and over a server, and bundles that are none."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.families.tokens.dots import SEEN, rngs, window

from specact.errors import BundleError, WireError
from specact.families.chunks.pair import PairSettings
from specact.families.chunks.remote import connect
from specact.families.tokens.policy import BINS, CENTRES, TokenBundle, load_tokens, to_actions, to_tokens
from specact.lab.rollout.processes import serving
from specact.lab.train.chunks import nearest_bins
from specact.load import load_exchange, load_pair, load_policy, make_pair
from specact.rng import StepAddress
from specact.wire.exchange import Request


def test_its_actions_are_the_tokens_of_greedy_decoding_in_the_demonstrated_range(
    wild: TokenBundle, greedy: np.ndarray, clear: np.ndarray
) -> None:
    units, chunks = wild.units, np.array(wild.policy().infer_batch(SEEN, rngs(len(SEEN))))
    places = (units.to_flow(chunks) + 1.0) * 127.5
    np.testing.assert_allclose(places.reshape(greedy.shape)[clear], greedy[clear], atol=1e-3)
    assert (chunks >= units.low).all() and (chunks <= units.high).all()


def test_a_number_goes_to_the_nearest_centre_in_training_as_in_decoding() -> None:
    actions = np.random.default_rng(0).uniform(-1.3, 1.3, (500, 3)).astype(np.float32)
    actions[:3] = [-1.0, 1.0, 9.0]
    tokens, inside = to_tokens(actions), np.clip(actions, -1.0, 1.0)
    # Halfway between two centres, rounding decides.
    assert np.abs(inside - to_actions(tokens)).max() <= 1.0 / (BINS - 1) + 1e-6
    assert np.count_nonzero(tokens != np.abs(inside[..., None] - CENTRES).argmin(-1)) <= 1
    np.testing.assert_array_equal(nearest_bins(torch.from_numpy(actions)).numpy(), tokens)
    np.testing.assert_array_equal(to_tokens(to_actions(np.arange(BINS))), np.arange(BINS))
    assert to_actions(to_tokens(np.array([-1.0, 1.0], np.float32))).tolist() == [-1.0, 1.0]


def test_what_is_not_finite_is_no_action(wild: TokenBundle) -> None:
    policy, bad = wild.policy(), window(3, state=np.nan)
    chunks = policy.infer_batch([window(3), bad], rngs(2))
    assert np.isfinite(chunks[0]).all() and np.isnan(chunks[1]).all()
    assert np.isnan(policy.infer(bad, np.random.default_rng(0))).all()


def test_it_is_a_chunk_policy_for_pairs_and_servers(wild: TokenBundle, tmp_path: Path) -> None:
    """A server process on loopback, too: the frame, the state and the instruction go there, a chunk comes back."""
    source, address = str(wild.path), StepAddress(0, 0, 0, 0)
    assert load_policy(source).fingerprint == wild.fingerprint != ""
    make_pair(tmp_path / "pair", source, source, PairSettings(execute=2))
    assert load_pair(tmp_path / "pair").observation.instruction
    exchange = load_exchange(source)
    with serving(wild.path) as server, connect(f"ws://127.0.0.1:{server.port}", deadline_ms=30_000.0) as remote:
        assert remote.spec == wild.spec
        for seen in SEEN[:3]:
            here = wild.policy().infer(seen, np.random.default_rng(0))
            np.testing.assert_array_equal(remote.ask(seen, address), here)
            (answer,) = exchange.answer("infer", [Request(seen, address)])
            assert not isinstance(answer, WireError)
            np.testing.assert_array_equal(answer["chunk"], here)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("chunk", 4, r"decoder\.onnx"), ("words", {}, "words"),
        ("words", {"vocabulary": ["go"], "length": 5}, "encoder"), ("kind", "flow", "a token policy"),
    ],
)  # fmt: skip
def test_parts_that_do_not_fit_are_refused(
    wild: TokenBundle, tmp_path: Path, key: str, value: object, said: str
) -> None:
    folder = shutil.copytree(wild.path, tmp_path / "bent")
    manifest = json.loads((folder / "manifest.json").read_text())
    (manifest["spec"] if key in manifest["spec"] else manifest)[key] = value
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(BundleError, match=said):
        load_tokens(folder)
