"""An environment of one's own, as ``MODULE:TASK``; one that only a bundle names is not imported."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from specact import load_pair
from specact.cli.calibrate import Demonstrations
from specact.cli.tised import Sweep
from specact.errors import ConfigError
from specact.gates.settings import GateSettings
from specact.lab.envs import env_of, load_task
from specact.lab.evaluation.run import Evaluation, evaluate
from specact.lab.rollout.distillation import collector
from specact.lab.rollout.pool import Pool
from specact.pair import Pair

THIRD_PARTY = Path(__file__).parents[2] / "thirdparty"
TROLLEY = "my_sim:TASK"


@pytest.fixture(autouse=True)
def beside_the_third_party(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(THIRD_PARTY)


@pytest.fixture
def foreign(tmp_path: Path) -> Pair[Any]:
    """A bundle that names code which must not be imported."""
    folder = Path(shutil.copytree(load_pair("ball").parts.path, tmp_path / "foreign"))
    manifest = folder / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"env": "antigravity_of_nobody:TASK"}))
    return load_pair(folder)


def test_it_is_loaded_by_name_and_what_is_none_is_refused() -> None:
    assert load_task(TROLLEY).name == "trolley"
    for name, named in (("push", "'pusht'"), ("my_sim:Trolley", "TASK"), ("my_simm:TASK", "'my_simm'")):
        with pytest.raises(ConfigError, match=named):
            load_task(name)


def test_a_bundle_cannot_have_code_imported(foreign: Pair[Any], tmp_path: Path) -> None:
    told = r"made for the environment 'antigravity_of_nobody:TASK'.*name it yourself: --env antigravity_of_nobody:TASK"
    with pytest.raises(ConfigError, match=told):
        env_of(foreign.env)
    with pytest.raises(ConfigError, match=told):
        env_of(foreign.env, TROLLEY)
    assert env_of(foreign.env, foreign.env) == foreign.env
    assert env_of("", TROLLEY) == TROLLEY
    with Pool(1) as pool:
        with pytest.raises(ConfigError, match=told):
            evaluate(Evaluation(str(foreign.path), None, ("draft",), 1), tmp_path / "run", lambda *_: None, pool)
        with pytest.raises(ConfigError, match=told):
            collector(10, pool, lambda *_: None)(foreign, [GateSettings("always")], 0)
    with pytest.raises(ConfigError, match=told):
        Demonstrations(env=TROLLEY).split(foreign)
    with pytest.raises(ConfigError, match=told):
        Sweep(bundle=str(foreign.path), levers=("aligned=0",), out=tmp_path / "sweep").run()
    # Who names it has it imported.
    with pytest.raises(ConfigError, match="there is no module 'antigravity_of_nobody'"), Pool(1) as pool:
        evaluate(Evaluation(str(foreign.path), foreign.env, ("draft",), 1), tmp_path / "run", lambda *_: None, pool)
