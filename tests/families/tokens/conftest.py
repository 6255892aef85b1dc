"""The token policy of these tests."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.families.tokens.dots import RECIPE, SEEN, dots, reread

from specact.families.chunks.policy import ChunkSpec
from specact.families.tokens.policy import TokenBundle, load_tokens
from specact.lab.train.chunks import demonstrated_stage, units_of, write_chunk_bundle
from specact.lab.train.dataset import observation_of, prepare


@pytest.fixture(scope="session")
def wild(tmp_path_factory: pytest.TempPathFactory) -> TokenBundle:
    """Large random weights: every token depends on all tokens before it."""
    folder, shows = tmp_path_factory.mktemp("wild") / "dots", dots()
    data, spec = prepare(shows, RECIPE), observation_of(RECIPE, RECIPE, shows, "the policy")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    module: Any = demonstrated_stage(data, RECIPE, ChunkSpec(spec, RECIPE.chunk, 2, 10.0)).module
    with torch.no_grad():
        for parameter in module.decoder.parameters():
            parameter.mul_(2.0)
        module.embedding.weight.mul_(8.0)
    write_chunk_bundle(folder, {"name": "dots", "env": ""}, RECIPE, module, units_of(data, "tokens"))
    return load_tokens(folder)


@pytest.fixture(scope="session")
def decoded_again(wild: TokenBundle) -> tuple[np.ndarray, np.ndarray]:
    """See :func:`~tests.families.tokens.dots.reread`, of all windows."""
    return reread(wild.networks, SEEN)


@pytest.fixture(scope="session")
def greedy(decoded_again: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    """The tokens of greedy decoding, window by window."""
    return decoded_again[0]


@pytest.fixture(scope="session")
def clear(decoded_again: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    """In which windows no token of greedy decoding is a near tie, whose order another order of summation may change."""
    mask = decoded_again[1] > 1e-3
    assert mask.mean() > 0.9
    return np.asarray(mask)
