"""The token policy of these tests."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.families.tokens.dots import RECIPE, dots

from specact.families.chunks.policy import ChunkSpec
from specact.families.tokens.policy import TokenBundle, load_tokens
from specact.lab.train.chunks import demonstrated_stage, units_of, write_chunk_bundle
from specact.lab.train.dataset import observation_of, prepare
from specact.lab.train.flow import TokenModel
from specact.lab.train.loop import run


@pytest.fixture(scope="session")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> TokenBundle:
    """Trained: it looks, and does what it is told."""
    return _written(tmp_path_factory.mktemp("tokens"), trained=True)


@pytest.fixture(scope="session")
def wild(tmp_path_factory: pytest.TempPathFactory) -> TokenBundle:
    """Large random weights: every token depends on all tokens before it."""
    return _written(tmp_path_factory.mktemp("wild"), trained=False)


def _written(folder: Path, trained: bool) -> TokenBundle:
    shows = dots()
    data = prepare(shows, RECIPE)
    spec = ChunkSpec(observation_of(RECIPE, RECIPE, shows, "the policy"), RECIPE.chunk, 2, 10.0)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    stage = demonstrated_stage(data, RECIPE, spec)
    assert isinstance(stage.module, TokenModel)
    if trained:
        stage.module.load_state_dict(run(stage, folder / "run", lambda done: None))
    else:
        with torch.no_grad():
            for parameter in stage.module.decoder.parameters():
                parameter.mul_(2.0)
            stage.module.embedding.weight.mul_(8.0)
    units = units_of(data, "tokens")
    write_chunk_bundle(folder / "dots", {"name": "dots", "env": ""}, RECIPE, stage.module, units)
    return load_tokens(folder / "dots")
