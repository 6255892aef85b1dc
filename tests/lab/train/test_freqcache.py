"""The refresh of a flow policy's prefix, made from the bundle that it was exported to."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from specact.bundle.bundle import find_bundle
from specact.cli.bundles import Export
from specact.errors import ConfigError
from specact.families.chunks.flow import load_flow
from specact.lab.train.freqcache import add_refresh
from specact.systems.freqcache import FREQCACHE, Patches, load_refresh


def test_it_is_made_by_the_command_and_found_beside_its_target(tmp_path: Path) -> None:
    bare = shutil.copytree(
        find_bundle("metaworld-flow"), tmp_path / "bare", ignore=shutil.ignore_patterns(FREQCACHE, "flash")
    )
    Export(Path(bare), tmp_path / "copy", refresh=True).run()
    target = load_flow(tmp_path / "copy")
    made = load_refresh(target.path / FREQCACHE, target)
    assert made.spec.cameras == {"image.corner2": Patches(10, 4, 4), "image.gripper": Patches(26, 4, 4)}
    rng = np.random.default_rng(1)
    old, new = (rng.standard_normal((1, 43, 192)).astype(np.float32) for _ in range(2))
    for count in (1, 20, 43):
        again = rng.permutation(43)[:count]
        mixed, sources = old.copy(), np.arange(43)
        mixed[:, again], sources[again] = new[:, again], -1
        found = made.refreshed(new, sources, target.networks.cache([], old))
        # Before any attention a token does not see the others, so that it is as in the prefix of what is mixed.
        np.testing.assert_allclose(found[:, 0], target.networks.cache([], mixed)[:, 0], atol=1e-5)


def test_a_policy_without_patches_has_nothing_to_reuse(tiny_flow: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r'encoder\.tokens = "patches"'):
        add_refresh(load_flow(tiny_flow))
    assert not (tiny_flow / FREQCACHE).exists()
    for source, said in ((tiny_flow, "patches"), (Path("ball"), "--refresh")):
        with pytest.raises(ConfigError, match=said):
            Export(source, tmp_path / "copy", refresh=True).run()
        assert not list(tmp_path.iterdir()), "a failure leaves nothing"
