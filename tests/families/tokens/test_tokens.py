"""A token policy that is trained here: it looks, it is told, and every way of decoding says the same."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from tests.families.tokens.dots import SIDE, TOLD, rngs, window, windows

from specact.errors import BundleError, ConfigError, ObservationError, WireError
from specact.families.chunks.pair import PairSettings
from specact.families.chunks.policy import Inpainting
from specact.families.codes.sampling import softmax
from specact.families.tokens.policy import Cache, Reading, TokenBundle, TokenNetworks, TokenPolicy, causal, load_tokens
from specact.lab.rollout.processes import serving
from specact.load import load_exchange, load_pair, load_policy, make_pair
from specact.observation import Window
from specact.remote_policy import connect
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
    tokens, finite = bundle.policy().decode(seen, rngs(300))
    assert finite.all()
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


def _again(networks: TokenNetworks, prefix: np.ndarray, tokens: np.ndarray, shift: int = 0) -> np.ndarray:
    cache, reading = networks.prefill(prefix)
    count = tokens.shape[1]
    if count:
        places = np.broadcast_to(np.arange(count) + shift, tokens.shape)
        reading = networks.read(cache, tokens, places, causal(len(tokens), count))
    return reading.logits[:, -1]


def test_a_token_in_another_place_means_something_else(bundle: TokenBundle) -> None:
    """What the test above would not see if places were ignored."""
    networks = bundle.networks
    prefix, tokens = networks.tokens(windows(20)), np.full((20, 1), 200)
    right, wrong = (_again(networks, prefix, tokens, shift) for shift in (0, 2))
    assert np.abs(right - wrong).max() > 0.01


def test_one_masked_pass_over_candidates_is_as_many_passes(bundle: TokenBundle) -> None:
    """Three candidates that share a beginning: a tree of 2 + 3 * 2 nodes, in a batch whose caches differ in length."""
    networks = bundle.networks
    cache, _ = networks.prefill(networks.tokens(windows(2)))
    first = networks.read(cache, np.array([[11], [22]]), np.zeros((2, 1), np.int64), causal(2, 1))
    cache.keep(first.entries, [np.array([0]), np.array([], np.int64)])  # the second window keeps nothing of it
    assert (cache.lengths == [networks.prefix + 1, networks.prefix]).all()

    rng = np.random.default_rng(3)
    stem, branches = rng.integers(0, 256, (2, 2)), rng.integers(0, 256, (2, 3, 2))
    tree = np.concatenate([stem, branches.reshape(2, 6)], 1)
    depth = np.array([0, 1, 2, 3, 2, 3, 2, 3])
    places = depth[None] + np.array([[1], [0]])
    among = np.zeros((8, 8), np.bool_)
    for node in range(8):
        among[node, : min(node, 2)] = True
        among[node, node] = True
        if node >= 2 and depth[node] == 3:
            among[node, node - 1] = True
    whole = networks.read(cache, tree, places, np.broadcast_to(among, (2, 8, 8)))
    for branch in range(3):
        nodes = np.array([0, 1, 2 + 2 * branch, 3 + 2 * branch])
        alone = networks.read(cache, tree[:, nodes], places[:, nodes], causal(2, 4))
        _same(whole, alone, nodes)
    # Without the mask candidates see each other, and it is not the same.
    blind = networks.read(cache, tree, places, causal(2, 8))
    assert np.abs(blind.logits[:, -1] - whole.logits[:, -1]).max() > 0.01

    # What is accepted is kept out of the tree, and decoding goes on from there.
    accepted = [np.array([0, 1, 4, 5]), np.array([0])]
    cache.keep(whole.entries, accepted)
    other = Cache(cache.entries.copy())
    other.lengths[:] = [networks.prefix, networks.prefix]
    path = np.array([11, *tree[0, accepted[0]]])
    straight = networks.read(other, path[None].repeat(2, 0), np.arange(5)[None].repeat(2, 0), causal(2, 5))
    np.testing.assert_allclose(
        cache.entries[0, ..., networks.prefix : networks.prefix + 5, :], straight.entries[0], atol=1e-4
    )
    assert cache.lengths.tolist() == [networks.prefix + 5, networks.prefix + 1]


def _same(whole: Reading, alone: Reading, nodes: np.ndarray) -> None:
    np.testing.assert_allclose(whole.logits[:, nodes], alone.logits, atol=1e-4)
    np.testing.assert_allclose(whole.features[:, nodes], alone.features, atol=1e-4)
    np.testing.assert_allclose(whole.entries[..., nodes, :], alone.entries, atol=1e-4)


def test_at_a_temperature_it_draws_from_the_softmax(bundle: TokenBundle) -> None:
    """The first token's frequencies over 4,000 draws; a chi-squared test that is wrong once in a million runs."""
    networks, count = bundle.networks, 4000
    _, reading = networks.prefill(networks.tokens(windows(1)))
    logits = np.repeat(reading.logits[:, -1], count, 0)
    wanted = softmax(reading.logits[0, -1].astype(np.float64), 2.0)
    # Eight groups of tokens, from the most likely to the least, that are about equally likely.
    order = np.argsort(wanted)[::-1]
    group = np.zeros(256, np.int64)
    group[order] = np.minimum(np.cumsum(wanted[order]) * 8, 7).astype(np.int64)
    expected = np.bincount(group, wanted, 8) * count
    there = expected > 5

    def statistic(temperature: float) -> float:
        found = np.bincount(group[bundle.policy(temperature)._sample(logits, rngs(count))], minlength=8)
        return float((np.square(found - expected)[there] / expected[there]).sum())

    assert statistic(2.0) < 44.0  # of at most 7 degrees of freedom: 2e-7
    assert statistic(1.0) > 44.0, "another temperature is seen"


def test_a_generator_decides_what_is_drawn_and_greedy_ignores_it(bundle: TokenBundle) -> None:
    seen = windows(4)
    hot, cold = bundle.policy(3.0), bundle.policy()
    np.testing.assert_array_equal(hot.infer_batch(seen, rngs(4)), hot.infer_batch(seen, rngs(4)))
    assert not np.array_equal(hot.infer_batch(seen, rngs(4)), hot.infer_batch(seen, rngs(8)[4:]))
    np.testing.assert_array_equal(cold.infer_batch(seen, rngs(4)), cold.infer_batch(seen, rngs(8)[4:]))


def test_its_actions_are_centres_of_bins_within_the_demonstrated_range(bundle: TokenBundle) -> None:
    chunks = np.array(bundle.policy(5.0).infer_batch(windows(50), rngs(50)))
    units = bundle.units
    places = (units.to_flow(chunks) + 1.0) * 127.5
    np.testing.assert_allclose(places, np.rint(places), atol=1e-3)
    assert (chunks >= units.low).all() and (chunks <= units.high).all()


def test_what_is_not_finite_is_no_action(bundle: TokenBundle) -> None:
    policy = bundle.policy()
    good, bad = window(3, TOLD[0]), window(3, TOLD[0], state=np.nan)
    chunks = policy.infer_batch([good, bad], rngs(2))
    assert np.isfinite(chunks[0]).all() and np.isnan(chunks[1]).all()
    with pytest.raises(ObservationError):
        policy.infer(bad, np.random.default_rng(0))


@pytest.mark.parametrize("temperature", [-1.0, np.nan, np.inf])
def test_a_temperature_that_is_none_is_refused(bundle: TokenBundle, temperature: float) -> None:
    with pytest.raises(ConfigError, match="temperature"):
        bundle.policy(temperature)


def test_it_cannot_inpaint(bundle: TokenBundle) -> None:
    old = Inpainting(np.zeros((3, 2), np.float32), np.ones(3, np.float32))
    with pytest.raises(ConfigError, match="inpaint"):
        bundle.policy().infer(window(3, TOLD[0]), np.random.default_rng(0), old)


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
