"""A pair's folder: whole or not there, and whatever its manifest says, no code of it runs."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specact.errors import BundleError, ConfigError
from specact.families.chunks import pair as folder
from specact.families.chunks.pair import PairSettings
from specact.load import load_exchange, load_pair, make_pair

FLOW = "pusht-flow"
MODULE = """
import numpy as np, specact
from pathlib import Path

@specact.chunk_policy(
    observation={"state": (2,)}, chunk=4, actions=2, rate_hz=10.0, low=[-1.0, -1.0], high=[1.0, 1.0]
)
def still(seen):
    return np.zeros((len(seen["state"]), 4, 2))

Path("imported").touch()
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "still_life", raising=False)
    (tmp_path / "still_life.py").write_text(MODULE)
    return tmp_path


@pytest.fixture
def made(here: Path) -> Path:
    make_pair(here / "pair", "still_life:still", "still_life:still", PairSettings(execute=2))
    return here / "pair"


def change(path: Path, *keys: str, to: Any) -> None:
    file = path / "manifest.json"
    manifest = entry = json.loads(file.read_text())
    for key in keys[:-1]:
        entry = entry[key]
    if to is KeyError:
        del entry[keys[-1]]
    else:
        entry[keys[-1]] = to
    file.write_text(json.dumps(manifest))


@pytest.mark.parametrize("part", ["draft", "target"])
@pytest.mark.parametrize("source", ["still_life:still", "policy.toml"])
def test_code_that_a_manifest_names_does_not_run_and_a_graph_that_is_not_checked_is_not_loaded(
    source: str, part: str, made: Path
) -> None:
    change(made, "sources", part, to=source)
    del sys.modules["still_life"]
    (made.parent / "imported").unlink()
    with pytest.raises(BundleError, match=f"no code, .*--{part}"):
        load_pair(made) if part == "draft" else load_exchange(str(made))
    assert not (made.parent / "imported").exists() and "still_life" not in sys.modules


@pytest.mark.parametrize("value", [KeyError, None, "x", -1, [], 10**400], ids=lambda value: f"{value!r:.9}")
@pytest.mark.parametrize(
    "keys",
    [
        ("spec", "execute"), ("spec", "target"), ("spec", "target", "chunk"), ("units",), ("units", "scale"),
        *((name,) for name in ("steps", "sources", "fingerprints")),
        *((name, part) for name in ("steps", "fingerprints") for part in ("draft", "target")),
    ],
    ids=".".join,
)  # fmt: skip
def test_a_manifest_of_another_kind_of_value_is_refused(keys: tuple[str, ...], value: Any, made: Path) -> None:
    change(made, *keys, to=value)
    with pytest.raises((BundleError, ConfigError)) as refused:
        load_pair(made, draft="still_life:still", target="still_life:still").target()
    assert keys[:2] != ("spec", "target") or "manifest.json" in str(refused.value)


@pytest.mark.parametrize("last", ["copytree", "write_json"])
def test_a_pair_is_whole_or_not_there(last: str, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    owner: Any = shutil if last == "copytree" else folder
    with monkeypatch.context() as patched:
        patched.setattr(owner, last, stop)
        with pytest.raises(KeyboardInterrupt):
            make_pair(here / "pair", FLOW, FLOW)
    assert not list(here.glob("pair*"))
    # The same command again does what it would have done.
    assert make_pair(here / "pair", FLOW, FLOW).name == "pair"
    assert [path.name for path in here.glob("pair*")] == ["pair"]


@pytest.mark.parametrize("place", ["file/pair", "dangling"])
def test_a_place_that_cannot_be_written_to_is_named(place: str, here: Path) -> None:
    (here / "file").touch()
    (here / "dangling").symlink_to("nowhere")
    with pytest.raises(ConfigError, match=f"{place.partition('/')[0]}"):
        make_pair(here / place, "still_life:still", "still_life:still")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("def __init__(self): raise ValueError('no device')", "no device"),
        ("spec = 'a spec'", "must be a ChunkSpec"),
        ("del inpaints", "must say whether it can continue a chunk"),
        ("infer_batch = lambda self, windows, rngs: None", "cannot answer"),
        ("infer_batch = lambda self, windows, rngs: [np.zeros((4, 2))]", "2 windows with 2 chunks"),
        ("infer_batch = lambda self, windows, rngs: exit(3)", "SystemExit"),
    ],
)
def test_a_class_that_is_no_policy_is_refused(body: str, message: str, here: Path) -> None:
    policy = f"class Own:\n    spec = still.spec\n    inpaints = False\n    infer = infer_batch = None\n    {body}\n"
    policy = policy.replace("infer = infer_batch = None", "def infer(self): pass\n    infer_batch = infer")
    (here / "still_life.py").write_text(MODULE + policy)
    with pytest.raises((BundleError, ConfigError), match=message):
        make_pair(here / "pair", "still_life:still", "still_life:Own")
    assert not (here / "pair").exists()


def test_no_action_of_the_target_is_cut_to_the_range_of_the_draft(here: Path) -> None:
    """Both say a range; the draft's is half as wide, and shifted."""
    narrow = "low=[-0.5, -0.5], high=[0.5, 1.5]"
    variant = MODULE.replace("def still", "def narrow").replace("low=[-1.0, -1.0], high=[1.0, 1.0]", narrow)
    (here / "still_life.py").write_text(MODULE + variant)
    units = make_pair(here / "pair", "still_life:narrow", "still_life:still").units
    np.testing.assert_allclose(units.centre - units.scale, [-1.0, -1.0])
    np.testing.assert_allclose(units.centre + units.scale, [1.0, 1.5])


def test_a_pair_is_for_the_environment_of_its_policies(here: Path) -> None:
    assert make_pair(here / "own", "ball#draft", "ball#target").env == "ball"
    assert make_pair(here / "other", "ball#draft", "ball#target", PairSettings(env="kitchen")).env == "kitchen"
    assert make_pair(here / "none", "still_life:still", "still_life:still").env == ""


def test_a_server_needs_the_target_alone(made: Path) -> None:
    """No draft, and the target from whoever starts it, not from the folder."""
    with pytest.raises(ConfigError, match=r"the target of .* is no bundle; name it with --target MODULE:NAME"):
        load_exchange(str(made))
    served = load_exchange(str(made), target="still_life:still")
    pair = load_pair(made, draft="still_life:still", target="still_life:still")
    assert (served.name, served.contract.fingerprint) == (pair.name, pair.exchange.contract.fingerprint)
    change(made, "fingerprints", "target", to="0" * 16)
    with pytest.raises(BundleError, match="was made for the target '0000000000000000', but still is"):
        load_exchange(str(made), target="still_life:still")
    change(made, "sources", "target", to="elsewhere/flow")
    with pytest.raises(ConfigError, match=r"elsewhere/flow.*name it with --target"):
        load_exchange(str(made))


def test_a_manifest_has_the_name_of_a_stored_bundle_and_the_path_of_another(here: Path, tiny_flow: Path) -> None:
    for source, stored in (("ball#target", "ball#target"), (str(tiny_flow), str(tiny_flow.resolve()))):
        make_pair(here / source[-4:], source, source)
        assert json.loads((here / source[-4:] / "manifest.json").read_text())["sources"]["target"] == stored
