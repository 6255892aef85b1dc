"""Actions as tokens."""

from __future__ import annotations

import numpy as np
import torch

from specact.families.tokens.policy import BINS, CENTRES, to_actions, to_tokens
from specact.lab.train.chunks import nearest_bins


def test_the_limits_are_centres_and_so_is_every_bin_of_its_own() -> None:
    assert to_actions(to_tokens(np.array([-1.0, 1.0], np.float32))).tolist() == [-1.0, 1.0]
    np.testing.assert_array_equal(to_tokens(CENTRES), np.arange(BINS))
    np.testing.assert_array_equal(to_tokens(to_actions(np.arange(BINS))), np.arange(BINS))


def test_a_number_goes_to_the_nearest_centre_and_the_rest_to_the_ends() -> None:
    actions = np.random.default_rng(0).uniform(-1.0, 1.0, (500, 3)).astype(np.float32)
    nearest = np.abs(actions[..., None] - CENTRES).argmin(-1)
    found = to_tokens(actions)
    # Halfway between two centres, rounding decides.
    assert np.abs(actions - to_actions(found)).max() <= 1.0 / (BINS - 1) + 1e-6
    assert np.count_nonzero(found != nearest) <= 1
    assert to_tokens(np.array([-9.0, 9.0], np.float32)).tolist() == [0, BINS - 1]


def test_training_and_decoding_have_the_same_bins() -> None:
    actions = np.random.default_rng(1).uniform(-1.3, 1.3, (400, 4)).astype(np.float32)
    actions[:4] = [[-1.0, 1.0, 0.0, 2.0]] * 4
    np.testing.assert_array_equal(nearest_bins(torch.from_numpy(actions)).numpy(), to_tokens(actions))
