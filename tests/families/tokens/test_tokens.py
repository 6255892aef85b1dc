"""A token policy that is trained here: it looks, it is told, and every way of decoding says the same."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.families.tokens.dots import SIDE, TOLD, rngs, window, windows

from specact.errors import BundleError, ObservationError, WireError
from specact.families.chunks.pair import PairSettings
from specact.families.chunks.remote import connect
from specact.families.tokens.policy import (
    BINS,
    CENTRES,
    TokenBundle,
    TokenNetworks,
    TokenPolicy,
    causal,
    load_tokens,
    to_actions,
    to_tokens,
)
from specact.lab.rollout.processes import serving
from specact.lab.train.chunks import nearest_bins
from specact.load import load_exchange, load_pair, load_policy, make_pair
from specact.observation import Window
from specact.rng import StepAddress
from specact.wire.exchange import Request


def far_from(policy: TokenPolicy, blank: bool = False, swapped: bool = False) -> float:
    """Mean distance of its answers from what was demonstrated."""
    distances = []
    for place in range(0, SIDE - 3, 2):
        for side, told in enumerate(TOLD):
            seen = window(place, TOLD[1 - side] if swapped else told)
            arrays = {**seen.arrays, "image": np.zeros_like(seen["image"])} if blank else seen.arrays
            chunk = policy.infer(Window(arrays, seen.instruction), np.random.default_rng(0))
            wanted = [place / (SIDE - 4) * 2.0 - 1.0, side * 2.0 - 1.0]
            distances.append(float(np.abs(chunk - wanted).mean()))
    return float(np.mean(distances))


def test_it_looks_at_the_frame_and_follows_the_instruction(bundle: TokenBundle) -> None:
    policy = bundle.policy()
    right = far_from(policy)
    assert right < 0.1
    assert far_from(policy, blank=True) > right + 0.15, "it must look"
    assert far_from(policy, swapped=True) > right + 0.5, "it must listen"


def test_with_the_cache_it_decodes_what_it_decodes_without(bundle: TokenBundle) -> None:
    """Token for token, where the two most likely differ by more than rounding; so nearly everywhere."""
    networks, seen = bundle.networks, windows(300)
    found = bundle.policy().decode(seen)
    tokens = found.tokens
    assert found.finite.all()
    prefix = networks.tokens(seen)
    clear = 0
    for place in range(networks.length):
        # Everything is read again for every token, and nothing kept but the observation.
        logits = _again(networks, prefix, tokens[:, :place])
        best = np.sort(logits, axis=-1)
        sure = best[:, -1] - best[:, -2] > 1e-3
        np.testing.assert_array_equal(logits.argmax(-1)[sure], tokens[sure, place])
        clear += int(sure.sum())
    assert clear > 0.95 * tokens.size


def _again(networks: TokenNetworks, prefix: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    cache, reading = networks.prefill(prefix)
    count = tokens.shape[1]
    if count:
        places = np.broadcast_to(np.arange(count), tokens.shape)
        reading = networks.read(cache, tokens, places, causal(len(tokens), count))
    return reading.logits[:, -1]


def test_its_actions_are_centres_of_bins_within_the_demonstrated_range(bundle: TokenBundle) -> None:
    units, chunks = bundle.units, np.array(bundle.policy().infer_batch(windows(50), rngs(50)))
    places = (units.to_flow(chunks) + 1.0) * 127.5
    np.testing.assert_allclose(places, np.rint(places), atol=1e-3)
    assert (chunks >= units.low).all() and (chunks <= units.high).all()


def test_a_number_goes_to_the_nearest_centre_in_training_as_in_decoding() -> None:
    actions = np.random.default_rng(0).uniform(-1.3, 1.3, (500, 3)).astype(np.float32)
    actions[:3] = [-1.0, 1.0, 9.0]
    found, inside = to_tokens(actions), np.clip(actions, -1.0, 1.0)
    # Halfway between two centres, rounding decides.
    assert np.abs(inside - to_actions(found)).max() <= 1.0 / (BINS - 1) + 1e-6
    assert np.count_nonzero(found != np.abs(inside[..., None] - CENTRES).argmin(-1)) <= 1
    np.testing.assert_array_equal(nearest_bins(torch.from_numpy(actions)).numpy(), found)
    np.testing.assert_array_equal(to_tokens(to_actions(np.arange(BINS))), np.arange(BINS))
    assert to_actions(to_tokens(np.array([-1.0, 1.0], np.float32))).tolist() == [-1.0, 1.0]


def test_what_is_not_finite_is_no_action(bundle: TokenBundle) -> None:
    policy = bundle.policy()
    good, bad = window(3, TOLD[0]), window(3, TOLD[0], state=np.nan)
    chunks = policy.infer_batch([good, bad], rngs(2))
    assert np.isfinite(chunks[0]).all() and np.isnan(chunks[1]).all()
    with pytest.raises(ObservationError):
        policy.infer(bad, np.random.default_rng(0))


def test_it_is_a_chunk_policy_for_pairs_and_servers(bundle: TokenBundle, tmp_path: Path) -> None:
    source = str(bundle.path)
    assert load_policy(source).fingerprint == bundle.fingerprint != ""
    make_pair(tmp_path / "pair", source, source, PairSettings(execute=2))
    assert load_pair(tmp_path / "pair").observation.instruction
    exchange = load_exchange(source)
    seen = window(5, TOLD[1])
    (answer,) = exchange.answer("infer", [Request(seen, StepAddress(0, 0, 0, 0))])
    assert not isinstance(answer, WireError)
    np.testing.assert_array_equal(answer["chunk"], bundle.policy().infer(seen, np.random.default_rng(0)))


def test_a_server_answers_as_it_does_here(bundle: TokenBundle) -> None:
    """A server process on loopback: the frame, the state and the instruction go there, a chunk comes back."""
    with serving(bundle.path) as server, connect(f"ws://127.0.0.1:{server.port}", deadline_ms=30_000.0) as remote:
        assert remote.spec == bundle.spec
        for row, seen in enumerate([window(4, TOLD[0]), window(4, TOLD[1]), window(15, TOLD[1])]):
            address = StepAddress(0, 0, 0, row)
            chunk = remote.ask(seen, address)
            np.testing.assert_array_equal(chunk, bundle.policy().infer(seen, np.random.default_rng(0)))


def test_parts_that_do_not_fit_are_refused(bundle: TokenBundle, tmp_path: Path) -> None:
    def bent(name: str, key: str, value: object) -> Path:
        folder = shutil.copytree(bundle.path, tmp_path / name)
        manifest = json.loads((folder / "manifest.json").read_text())
        (manifest["spec"] if key in manifest["spec"] else manifest)[key] = value
        (folder / "manifest.json").write_text(json.dumps(manifest))
        return folder

    with pytest.raises(BundleError, match=r"decoder\.onnx"):
        load_tokens(bent("longer", "chunk", 4))
    with pytest.raises(BundleError, match="words"):
        load_tokens(bent("wordless", "words", {}))
    with pytest.raises(BundleError, match="encoder"):
        load_tokens(bent("talkative", "words", {"vocabulary": ["go"], "length": 5}))
    with pytest.raises(BundleError, match="a token policy"):
        load_tokens(bent("other", "kind", "flow"))
