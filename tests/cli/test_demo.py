"""The demo of policies that are their own draft, and what a report says of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specact.cli.demo import FLOW, demo
from specact.cli.report import report
from specact.errors import ConfigError


def test_a_flow_policy_is_shown_in_its_ways_to_a_chunk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    demo("pusht-flow", episodes=1, out=tmp_path / "run", workers=1, json=True)
    told = json.loads(capsys.readouterr().out)
    assert tuple(told["methods"]) == FLOW
    assert told["methods"]["full"]["full"] == 1.0 > told["methods"]["flash"]["full"]
    # The page about action codes says why it is not for this.
    with pytest.raises(ConfigError, match="specact reproduce tokens or flow"):
        report((tmp_path / "run",), out=tmp_path / "page.html")
