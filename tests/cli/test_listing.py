"""``specact list``, and the script with which a shell completes the command."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
from tests.cli.conftest import Typed

from specact.bundle.bundle import named_bundles
from specact.cli.listing import Kind, first_sentence
from specact.cli.main import VERBS
from specact.gates.settings import GATES
from specact.lab.envs import TASKS
from specact.lab.rollout.methods import METHODS
from specact.links.link import LINKS
from specact.load import COMPOSITIONS


def test_everything_that_has_a_name_is_listed_with_a_line(environment: dict[str, str]) -> None:
    """And nothing of it needs what an extra brings."""
    script = (
        "import sys; from specact.cli.main import main; sys.argv = ['specact', 'list', '--json']; main()\n"
        "print([name for name in ('torch', 'gymnasium', 'mujoco', 'scipy', 'matplotlib') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], text=True, capture_output=True, env=environment, timeout=600)
    told, imported = done.stdout.strip().rsplit("\n", 1)
    listing = json.loads(told)
    assert imported == "[]" and tuple(listing) == get_args(Kind)
    assert {"ball", "ball-chase-flow"} <= named_bundles().keys() <= listing["bundles"].keys()
    assert listing["methods"].keys() | listing["decodings"].keys() == METHODS.keys() | COMPOSITIONS.keys()
    for kind, names in {"gates": GATES, "environments": [*TASKS, "libero-SUITE"], "links": LINKS}.items():
        assert listing[kind].keys() == set(names)
    assert set(listing["families"]) == {"codes", "tokens", "chunks"}
    assert any(name.endswith("ball.toml") for name in listing["recipes"])
    for names in listing.values():
        lines = [*names.values()]
        assert all(len(name) <= 21 or "/" in name for name in names) and all(len(line) > 8 for line in lines)
        assert not [line for line in lines if "`" in line or line.endswith("et al")]
    # Names that share a file or a class do not share a line.
    for kind, pairs in {"environments": ("ball", "ball-chase"), "gates": ("learned", "learned_action")}.items():
        assert listing[kind][pairs[0]] != listing[kind][pairs[1]]


def test_some_lists_and_bundles_of_the_working_folder(
    typed: Typed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_bundle: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny_bundle, tmp_path / "runs" / "mine" / "bundles" / "tiny")
    (tmp_path / "evaluated").mkdir()
    (tmp_path / "evaluated" / "manifest.json").write_text('{"evaluation": {}}')
    listing = typed("list", "bundles", "links", "--json").summary
    assert set(listing) == {"bundles", "links"}
    assert listing["bundles"]["runs/mine/bundles/tiny"] == "a pair of draft and target, environment ball"
    assert "evaluated" not in listing["bundles"]
    printed = typed("list", "links").out.splitlines()
    assert printed[0] == "links" and len(printed) == 1 + len(LINKS)


def test_a_first_sentence_is_plain() -> None:
    text = "Asks ``a_t`` of :class:`~specact.x.Y`, Chi et al. 2023. Then more.\n\nAnd more."
    assert first_sentence(text) == "Asks a_t of specact.x.Y, Chi et al. 2023"
    assert first_sentence(None) == ""


@pytest.mark.parametrize(
    ("words", "wanted", "not_wanted"),
    [
        (["specact", ""], set(VERBS), {"--server"}),
        (["specact", "ser"], {"serve"}, {"run"}),
        (["specact", "run", "ball", "--"], {"--server", "--on-miss", "--config", "--live"}, {"--port"}),
        (["specact", "run", "ball", "--execution", ""], {"synchronous", "late", "corrected"}, {"aligned"}),
        (["specact", "tised", "sweep", "--le"], {"--levers"}, {"--paces"}),
    ],
    ids=lambda words: " ".join(sorted(words)),  # of sets, too: the order of ids must not hang on the process
)
def test_bash_completes_verbs_options_and_choices(
    typed: Typed, tmp_path: Path, environment: dict[str, str], words: list[str], wanted: set[str], not_wanted: set[str]
) -> None:
    (tmp_path / "specact.bash").write_text(typed("completion", "bash").out)
    script = (
        'source "$0"; how=$(complete -p specact); function=${how#*-F }; function=${function%% *}\n'
        'COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); $function; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(
        ["bash", "-c", script, tmp_path / "specact.bash", *words], text=True, capture_output=True, env=environment
    )
    completions = set(done.stdout.split())
    assert wanted <= completions and not completions & not_wanted, done.stderr


def test_zsh_has_a_script_as_well(typed: Typed) -> None:
    told = typed("completion", "zsh").out
    assert told.startswith("#compdef specact") and "calibrate" in told
