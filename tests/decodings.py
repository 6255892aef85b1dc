"""Every decoding of tokens by name: those of the package, and their controls in the experiments."""

from __future__ import annotations

from experiments.tokens.methods import METHODS

from specact.families.tokens.pair import Decoding

DECODINGS: dict[str, Decoding] = {
    name: method.composition for name, method in METHODS.items() if isinstance(method.composition, Decoding)
}
