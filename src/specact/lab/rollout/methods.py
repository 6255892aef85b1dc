"""The methods of an evaluation: each a composition of a draft, a gate and a verifier, and what it is compared with."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from specact.errors import unknown_name
from specact.families.codes.policy import CodePolicy
from specact.families.tokens.pair import Decoding
from specact.gates.learned import HeadDraft, TargetHead
from specact.gates.settings import CALIBRATED, LEARNED, ORACLES, load_gate
from specact.imports import is_plugin
from specact.load import COMPOSITIONS
from specact.pair import Pair
from specact.systems.flash import Rounds

# How a token policy or a flow policy drafts and verifies, and the gate that it runs with.
if TYPE_CHECKING:
    Composition: TypeAlias = Decoding | Rounds
else:
    Composition = Any  # msgspec, which checks settings, knows no unions of dataclasses
# A method that a run is compared with; of several names the first one that ran.
Rival = str | tuple[str, ...]


@dataclass(frozen=True)
class Method:
    """A draft, a gate and a verifier under a name; methods that share gate and composition share the calibration.

    ``verifier`` ``target`` takes the target's own codes; ``waits_for_draft`` is whether the draft's time is part of the
    method's: the ungated target needs no draft; ``proposes`` ``head`` is the target's distribution as predicted by the
    learned gate's head; ``on_device`` needs no link. A random gate runs at the achieved rate of the method ``rate_of``,
    and shares forced first step and limit on skips with the gate ``limits_of``. ``composition`` is how a token or flow
    policy drafts and verifies, None for as it was loaded; ``rivals`` are the methods of its paired contrasts.
    """

    name: str
    gate: str
    about: str
    verifier: Literal["speculative", "target"] = "speculative"
    waits_for_draft: bool = True
    proposes: Literal["draft", "head"] = "draft"
    on_device: bool = False
    rate_of: str | None = None
    limits_of: str | None = None
    composition: Composition | None = None
    rivals: tuple[Rival, ...] = ()

    @property
    def uses_head(self) -> bool:
        """Whether it evaluates the target head."""
        return self.proposes == "head" or self.gate in LEARNED

    @property
    def decoding(self) -> str:
        """The name if the method fixes how a policy drafts and verifies, for the name of a calibration; else empty."""
        return "" if self.composition is None else self.name

    @property
    def needs_codes(self) -> bool:
        """Whether its gate or draft reads the distributions over codes."""
        return self.gate in ("uncertainty", "learned_action", *ORACLES) or self.proposes == "head"

    @property
    def needs_head(self) -> bool:
        """Whether it, or its rival, needs a target head."""
        return self.uses_head or self.limits_of in LEARNED

    def proposer(self, pair: Pair[Any]) -> CodePolicy:
        """The policy of a pair of action codes that proposes codes; a head's errors are those of its loading."""
        draft: CodePolicy = pair.parts.draft
        return HeadDraft(draft, TargetHead.of(pair)) if self.proposes == "head" else draft

    def rivals_among(self, names: tuple[str, ...]) -> list[str]:
        """The rivals that ran, given the names of all methods that ran."""
        choices = [(rival,) if isinstance(rival, str) else rival for rival in self.rivals]
        matches = [next((name for name in choice if name in names), None) for choice in choices]
        return [name for name in matches if name is not None]


def composed(name: str, composition: Composition, *rivals: Rival) -> Method:
    """The method of a composition, with the gate that it names."""
    return Method(
        name, composition.gate, composition.about, rate_of=composition.rate_of, composition=composition, rivals=rivals
    )


def random_control(method: Method, name: str = "", *rivals: Rival) -> Method:
    """The same draft and verifier, verified at random: at the rate that the method achieved, with its forced steps."""
    about = f"asks at random, at the rate of {method.name} and with its forced steps"
    return replace(
        method, name=name or f"random_{method.name}", gate="random", about=about, rate_of=method.name,
        limits_of=method.gate, rivals=rivals,
    )  # fmt: skip


# Random baselines without a limit on skips; the deviation alone may have one.
CHANCE = ("random_learned", "random")
HYBRID = Method("hybrid", "always", "asks at every inference", rivals=("target",))
_ADAHI = Method(
    "adahi", "adahi", "asks where the action deviates", rivals=("random", "hybrid", "gated_target", "head_draft")
)
_LEARNED = Method(
    "learned", "learned", "asks where a learned head expects rejection",
    rivals=(CHANCE, "head_draft", "head_random", "adahi", "hybrid"),
)  # fmt: skip
# Of token policies and flow policies the main form of each system, what it is built from, and its trivial controls; the
# ablations of a paper are compositions of its experiment.
_SYSTEMS: dict[str, tuple[Rival, ...]] = {
    "ar": (), "strict": ("ar",), "strict_last": (), "last": (), "specvla": ("ar", "last"), "kerv": ("ar",),
    "heisd": ("ar", "random_heisd"), "heisd_fixed": ("ar",), "full": (), "full_2": ("full",),
    "full_1": ("full",), "full_5": (), "block": ("full",), "unchecked": (), "flash_last": (),
    "freqcache": ("full",), "flash": ("full", "full_2", "unchecked", "flash_last"), "flash_fitted": ("full", "full_2"),
}  # fmt: skip

METHODS = {
    method.name: method
    for method in (
        Method("draft", "never", "the draft alone"),
        Method(
            "head_draft", "never", "the learned gate's head as the draft, alone", proposes="head",
            rivals=("draft", "hybrid"),
        ),
        Method("target", "always", "every step from the target", "target", waits_for_draft=False, rivals=("draft",)),
        Method(
            "target_on_device", "always", "the target on the device, without a link", "target", waits_for_draft=False,
            on_device=True, rivals=("hybrid",),
        ),
        HYBRID,
        random_control(_ADAHI, "random", "plain_random"),
        Method("plain_random", "random", "asks at random, at ADAHI's rate without forced steps", rate_of="adahi"),
        random_control(_LEARNED),
        replace(
            random_control(_LEARNED, "head_random", CHANCE), proposes="head",
            about="the head as the draft, asks at random, at the learned gate's rate",
        ),
        _ADAHI,
        Method("gated_target", "adahi", "ADAHI's gate, the target's own codes", "target"),
        Method("uncertainty", "uncertainty", "asks where the draft is unsure (U-HLM)", rivals=(CHANCE, "adahi")),
        _LEARNED,
        Method(
            "learned_action", "learned_action", "asks where a learned head expects another action",
            rivals=(CHANCE, "head_draft", "hybrid"),
        ),
        Method("oracle", "oracle", "asks where rejection is likeliest; not deployable", rivals=(CHANCE,)),
        Method(
            "oracle_action", "oracle_action", "asks where the action changes most; not deployable", rivals=(CHANCE,)
        ),
        *(composed(name, COMPOSITIONS[name], *rivals) for name, rivals in _SYSTEMS.items()),
    )
}  # fmt: skip


def load_method(name: str | Method) -> Method:
    """The method of this name, one of :data:`METHODS`; a method itself is returned as it is.

    Or another decoding, see :func:`specact.load_pair`; a gate that can be calibrated, see
    :func:`~specact.gates.settings.load_gate`, for exact verification where it asks for it; or ``random_NAME``, its
    :func:`random_control`. Any other is a :exc:`ConfigError`.
    """
    if isinstance(name, Method):
        return name
    if name in METHODS:
        return METHODS[name]
    if name in COMPOSITIONS:
        return composed(name, COMPOSITIONS[name])
    if name.startswith("random_"):
        return random_control(load_method(name.removeprefix("random_")))
    if not is_plugin(name) and name not in CALIBRATED:
        raise unknown_name("method", name, {*METHODS, *COMPOSITIONS}, plugins=True)
    kind = load_gate(name)
    about = (inspect.getdoc(kind) or kind.__name__).splitlines()[0]
    about = f"asks where a gate says so: {about}"
    return Method(name, name, about, rivals=((f"random_{name}", *CHANCE), "hybrid"))
