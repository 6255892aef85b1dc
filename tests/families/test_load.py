"""What a pair was loaded with, so that another process loads the same one."""

from __future__ import annotations

import pytest

from specact.errors import ConfigError
from specact.load import COMPOSITIONS, load_pair
from specact.pair import PairSource


@pytest.mark.parametrize(("name", "decoding"), [("relocate-tokens", "kerv"), ("ball-chase-flow", "full_2")])
def test_what_was_named_is_found_again(name: str, decoding: str) -> None:
    pair = load_pair(name, decoding=decoding)
    copy = load_pair(pair.source)
    assert copy.source == pair.source and pair.source.decoding == decoding
    how = {"relocate-tokens": "decoding", "ball-chase-flow": "rounds"}[name]
    assert getattr(copy.parts, how) == COMPOSITIONS[decoding]


@pytest.mark.parametrize(("name", "default"), [("relocate-tokens", "ar"), ("ball-chase-flow", "full")])
def test_the_default_decoding_is_one_source_however_it_was_named(name: str, default: str) -> None:
    assert load_pair(name).source == load_pair(name, decoding=default).source


def test_a_source_is_written_as_the_arguments_of_a_command() -> None:
    assert PairSource("ball").cli_args == "ball"
    whole = PairSource("pusht-flow", "small", "lerobot:PATH@20", "flash")
    assert whole.cli_args == "pusht-flow --draft small --target lerobot:PATH@20 --decoding flash"


def test_only_what_decodes_has_decodings() -> None:
    with pytest.raises(ConfigError, match=r"ball is .*--decoding kerv.* a token policy"):
        load_pair("ball", decoding="kerv")
