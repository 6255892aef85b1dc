"""What a pair was loaded with, so that another process loads the same one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from specact.errors import ConfigError
from specact.families.flash.pair import FlashPair
from specact.families.flash.rounds import ROUNDS
from specact.families.load import load_named, load_pair
from specact.families.tokens.decoding import DECODINGS
from specact.families.tokens.pair import TokenPair
from specact.pair import AS_STORED, Named


def test_every_decoding_is_found_again() -> None:
    tokens, flow = load_pair("relocate-tokens"), load_pair("ball-chase-flow")
    assert isinstance(tokens, TokenPair) and isinstance(flow, FlashPair)
    found = {name: Named.of(replace(tokens, decoding=one)) for name, one in DECODINGS.items()}
    found |= {name: Named.of(replace(flow, rounds=one)) for name, one in ROUNDS.items()}
    assert found.pop("ar") == found.pop("full") == AS_STORED, "the default, however it was named"
    assert found == {name: Named(decoding=name) for name in found}
    again = load_named("relocate-tokens", found["kerv"])
    assert isinstance(again, TokenPair) and again.decoding == DECODINGS["kerv"]


def test_it_is_written_as_the_options_of_a_command() -> None:
    assert AS_STORED.words == ""
    assert (
        Named("small", "lerobot:PATH@20", "flash").words == " --draft small --target lerobot:PATH@20 --decoding flash"
    )
    assert Named.of(load_pair("metaworld-tokens", draft="metaworld-draft", decoding="specvla")) == Named(
        "metaworld-draft", None, "specvla"
    )


def test_a_decoding_of_ones_own_has_no_name() -> None:
    tokens, flow = load_pair("relocate-tokens"), load_pair("ball-chase-flow")
    assert isinstance(tokens, TokenPair) and isinstance(flow, FlashPair)
    with pytest.raises(ConfigError, match=r"a decoding of your own has no name .* choose one of ar, strict"):
        Named.of(replace(tokens, decoding=replace(DECODINGS["specvla"], bins=7)))
    with pytest.raises(ConfigError, match=r"a decoding of your own has no name .* choose one of full, full_5"):
        Named.of(replace(flow, rounds=replace(ROUNDS["flash"], within=0.2)))


def test_only_what_decodes_has_decodings() -> None:
    with pytest.raises(ConfigError, match="ball is no token policy and no flow policy"):
        load_pair("ball", decoding="kerv")
