"""The methods of an evaluation, each a composition of a draft, a gate and a verifier."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Literal

from specact.errors import unknown_name
from specact.families.codes.bundle import Bundle
from specact.families.codes.head import HeadDraft, load_head
from specact.families.codes.spec import CodePolicy
from specact.families.flash.rounds import ROUNDS
from specact.families.tokens.decoding import DECODINGS
from specact.gates.settings import CALIBRATED, LEARNED, ORACLES, load_gate
from specact.plugins import is_plugin


@dataclass(frozen=True)
class Method:
    """A draft, a gate and a verifier under a name.

    Attributes:
        gate: name of its gate; methods that share it share its calibration.
        verifier: ``speculative`` or ``target`` (the target's own codes).
        about: a description in one line.
        waits_for_draft: whether the draft's time is part of the method's; the ungated target needs no draft.
        proposes: ``draft``, or ``head``: the target's distribution as predicted by the learned gate's head.
        on_device: whether the target runs on the device, without a link.
        rate_of: of random gates: the method at whose achieved rate it runs.
        limits_of: of random gates: the method whose forced first step and limit on skips it shares.
        decoding: of a token policy: which of :data:`~specact.families.tokens.decoding.DECODINGS`, of a flow policy:
            which of :data:`~specact.families.flash.rounds.ROUNDS`; empty for methods that do not fix it.
    """

    gate: str
    verifier: Literal["speculative", "target"]
    about: str
    waits_for_draft: bool = True
    proposes: Literal["draft", "head"] = "draft"
    on_device: bool = False
    rate_of: str | None = None
    limits_of: str | None = None
    decoding: str = ""

    @property
    def uses_head(self) -> bool:
        """Whether it evaluates the target head."""
        return self.proposes == "head" or self.gate in LEARNED

    @property
    def needs_codes(self) -> bool:
        """Whether its gate reads the distributions over codes."""
        return self.gate in ("uncertainty", *ORACLES)

    @property
    def needs_head(self) -> bool:
        """Whether it, or its rival, needs a target head."""
        return self.uses_head or (self.limits_of is not None and load_method(self.limits_of).uses_head)

    def proposer(self, bundle: Bundle) -> CodePolicy:
        """The policy that proposes codes.

        Raises:
            ConfigError: if it is a head, and the bundle has none.
            BundleError: if the head does not fit the bundle.
        """
        return HeadDraft(bundle.draft, load_head(bundle)) if self.proposes == "head" else bundle.draft


def _random(about: str, rate_of: str, limits_of: str | None, proposes: Literal["draft", "head"] = "draft") -> Method:
    return Method("random", "speculative", about, proposes=proposes, rate_of=rate_of, limits_of=limits_of)


METHODS = {
    "draft": Method("never", "speculative", "the draft alone"),
    "head_draft": Method("never", "speculative", "the learned gate's head as the draft, alone", proposes="head"),
    "target": Method("always", "target", "every step from the target", waits_for_draft=False),
    "target_on_device": Method(
        "always", "target", "the target on the device, without a link", waits_for_draft=False, on_device=True
    ),
    "hybrid": Method("always", "speculative", "every step verified"),
    "random": _random("verified at random, at ADAHI's rate and with its forced steps", "adahi", "adahi"),
    "plain_random": _random("verified at random, at ADAHI's rate without forced steps", "adahi", None),
    "random_learned": _random(
        "verified at random, at the learned gate's rate and with its forced steps", "learned", "learned"
    ),
    "head_random": _random(
        "the head as the draft, verified at random, at the learned gate's rate", "learned", "learned", "head"
    ),
    "adahi": Method("deviation", "speculative", "verified where the action deviates"),
    "gated_target": Method("deviation", "target", "ADAHI's gate, the target's own codes"),
    "uncertainty": Method("uncertainty", "speculative", "verified where the draft is unsure (U-HLM)"),
    "learned": Method("learned", "speculative", "verified where a learned head expects rejection"),
    "learned_action": Method("learned_action", "speculative", "verified where a learned head expects another action"),
    "oracle": Method("oracle", "speculative", "verified where rejection is likeliest; not deployable"),
    "oracle_action": Method("oracle_action", "speculative", "verified where the action changes most; not deployable"),
    **{
        name: Method(how.gate, "speculative", how.about, rate_of=how.rate_of, decoding=name)
        for name, how in (DECODINGS | ROUNDS).items()
    },
}


def load_method(name: str) -> Method:
    """The method of this name: one of :data:`METHODS`, or exact verification where a calibrated gate asks for it.

    Args:
        name: of a method, or of a gate, see :func:`~specact.gates.settings.load_gate`.

    Raises:
        ConfigError: if there is none.
    """
    if name in METHODS:
        return METHODS[name]
    if not is_plugin(name) and name not in CALIBRATED:
        raise unknown_name("method", name, METHODS, plugins=True)
    kind = load_gate(name)
    about = (inspect.getdoc(kind) or kind.__name__).splitlines()[0]
    return Method(name, "speculative", f"verified where a gate asks for it: {about}")
