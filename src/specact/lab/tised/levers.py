"""The levers: methods that make inferences cheaper, hide their latency, or make them rarer, each with a strength."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from specact.bundle.bundle import find_bundle
from specact.bundle.manifest import read_manifest
from specact.errors import ConfigError, unknown_name
from specact.execution.schedule import Execution, Kind
from specact.families.chunks.flow import FlowBundle, load_flow
from specact.families.codes.pair import CodeParts, codes_of
from specact.gates.learned import TargetHead
from specact.gates.settings import GateSettings, gate_settings
from specact.lab.tised.drivers import Driver, PairDriver, PolicyDriver, RoundsDriver, Setting, SplitDriver
from specact.load import load_pair
from specact.pair import Pair, PairSource
from specact.systems.flow import FLASH, FULL, ROUNDS
from specact.systems.freqcache import FREQCACHE, Reuse, ReusingRounds


@dataclass(frozen=True)
class Subject:
    """What levers are applied to.

    Attributes:
        bundle: a pair, or a flow policy alone.
        execute: n, executed actions of a chunk.
        variants: cheaper variants of its networks, :class:`~specact.lab.train.variants.BundleVariants`.
        steps: Euler steps of a flow policy, where they are not the lever.
    """

    bundle: FlowBundle | Pair[Any]
    execute: int
    variants: Any
    steps: int = 10

    @property
    def driver(self) -> PolicyDriver:
        """The policy as it is, executed synchronously: the flow, or the target of a pair of action codes."""
        path, execution = str(self.bundle.path), Execution("synchronous", self.execute)
        if isinstance(self.bundle, FlowBundle):
            return PolicyDriver(path, execution, steps=self.steps)
        codes_of(self.bundle, "a policy alone")
        return PolicyDriver(path, execution, "target")

    @property
    def kinds(self) -> tuple[str, ...]:
        """Of :data:`KINDS`, those that it is."""
        if isinstance(self.bundle, FlowBundle):
            return "policy", "flow"
        return ("policy", "codes", "pair") if isinstance(self.bundle.parts, CodeParts) else ("pair",)


def subject_of(
    bundle: str, variants_of: Callable[[Any], Any], draft: str | None, decoding: str, execute: int | None, steps: int
) -> Subject:
    """What the levers are applied to; the variants of its networks are not made yet.

    Without ``execute`` it is the bundle's own, for a flow policy alone half of the chunk.
    """
    alone = draft is None and not decoding and read_manifest(find_bundle(bundle)).kind == "flow"
    loaded = load_flow(bundle) if alone else load_pair(bundle, draft=draft, decoding=decoding)
    usual = max(1, loaded.spec.chunk // 2) if isinstance(loaded, FlowBundle) else loaded.execute
    return Subject(loaded, execute or usual, variants_of(loaded), steps)


@dataclass(frozen=True)
class Lever:
    """A lever.

    Attributes:
        about: its effect, and the meaning of its strength.
        on: what it applies to: one policy, that of a flow bundle or the target of a pair of action codes; the flow; the
            pair of action codes; or a pair of any family with a draft.
        strengths: all, or those of a subject, the baseline (no effect) first.
        apply: makes the driver of a subject at a strength.
        shares: whether strengths are shares or distances; else they are integers.
    """

    about: str
    on: Literal["policy", "flow", "codes", "pair"]
    strengths: tuple[float, ...] | Callable[[Subject], tuple[float, ...]]
    apply: Callable[[Subject, float], Driver]
    shares: bool = False


KINDS = {
    "policy": "a flow policy or a pair of action codes", "flow": "a flow policy", "codes": "a pair of action codes",
    "pair": "a pair, which a token policy or a flow policy is with --draft",
}  # fmt: skip


def settings_of(name: str, subject: Subject, strengths: tuple[float, ...] | None = None) -> list[Setting]:
    """A lever's settings, the baseline first.

    Args:
        name: one of :data:`LEVERS`.
        subject: what it is applied to.
        strengths: in place of its own; the baseline is always added.

    Raises:
        ConfigError: for an unknown lever, one that does not fit the subject, or a strength out of its range.
    """
    if name not in LEVERS:
        raise unknown_name("lever", name, LEVERS)
    lever = LEVERS[name]
    if lever.on not in subject.kinds:
        fitting = [other for other, lever in LEVERS.items() if lever.on in subject.kinds]
        raise ConfigError(
            f"lever {name!r} needs {KINDS[lever.on]}, which {subject.bundle.name!r} is not; its levers are "
            f"{', '.join(fitting)}"
        )
    defaults = lever.strengths(subject) if callable(lever.strengths) else lever.strengths
    wanted = defaults if strengths is None else tuple(dict.fromkeys((defaults[0], *strengths)))
    for strength in wanted:
        if not (lever.shares or strength.is_integer()):
            raise ConfigError(f"a strength of lever {name!r} must be a whole number, got {strength:g}")
    return [Setting(name, strength, lever.apply(subject, strength)) for strength in wanted]


def read_settings(words: Sequence[str], subject: Subject) -> tuple[Setting, ...]:
    """The settings of levers ``NAME`` or ``NAME=STRENGTH,...``; errors as of :func:`settings_of`, or for no number."""
    settings: list[Setting] = []
    for name, given, numbers in (word.partition("=") for word in words):
        try:
            strengths = tuple(map(float, numbers.split(","))) if given else None
        except ValueError:
            raise ConfigError(f"strengths of a lever must be numbers separated by commas, got {numbers!r}") from None
        settings += settings_of(name, subject, strengths)
    return tuple(settings)


def _check_range(what: str, strength: float, most: float = 1.0) -> None:
    if not 0.0 <= strength <= most:
        raise ConfigError(f"{what} must lie in [0, {most:g}], got {strength:g}")


def _path(subject: Subject, part: str = "", hint: str = "") -> str:
    """The bundle's path; refuses one without this part."""
    path = subject.bundle.path
    if path is None or (part and not (path / part).exists()):
        raise ConfigError(f"{subject.bundle.name!r} has no {hint}")
    return str(path)


def _codes(subject: Subject) -> CodeParts:
    assert isinstance(subject.bundle, Pair) and isinstance(subject.bundle.parts, CodeParts), "checked by settings_of"
    return subject.bundle.parts


def _quantised(subject: Subject, strength: float) -> Driver:
    if strength not in (0.0, 4.0, 8.0):
        raise ConfigError(f"quantisation to 8 bits is 4, to 4 bits 8 (times fewer than 32), none 0; got {strength:g}")
    files = subject.variants.quantised(32 // int(strength)) if strength else {}
    return replace(subject.driver, files=tuple((part, str(file)) for part, file in files.items()))


def _windowed(subject: Subject, strength: float) -> Driver:
    longest = _codes(subject).spec.target.history
    if not 1 <= strength <= longest:
        raise ConfigError(f"{subject.bundle.name!r} supports 1 to {longest} observations, got {strength:g}")
    if strength == longest:
        return subject.driver
    file = subject.variants.windowed(int(strength))
    return replace(subject.driver, files=(("target", str(file)),), window=int(strength))


def _overlapped(kind: Kind, subject: Subject, strength: float) -> Driver:
    # Without overlap all modes are synchronous.
    driver = subject.driver
    return replace(driver, execution=Execution(kind, subject.execute, int(strength))) if strength else driver


def _alone(subject: Subject, strength: float) -> Driver:
    if strength not in (0.0, 1.0):
        raise ConfigError(f"the policy alone on the device must be 0, the target, or 1, the head; got {strength:g}")
    if strength:
        TargetHead.of(_codes(subject).pair())  # fails early if the bundle has none
    return replace(subject.driver, role="head" if strength else "target")


def _remote(kind: Kind, subject: Subject, strength: float) -> Driver:
    overlap = 0 if kind == "synchronous" else int(strength)
    return replace(subject.driver, execution=Execution(kind, subject.execute, overlap), offloads=True)


def _verified(gate: str, late: bool, subject: Subject, strength: float) -> Driver:
    pair: Any = subject.bundle
    _check_range("a transmission rate", strength)
    base = PairDriver(pair.source, GateSettings("always"), late=late)
    if strength == 1.0:
        return base
    if strength == 0.0:
        return replace(base, gate=GateSettings("never"))
    if gate == "random":
        # Like every gate, it sends an episode's first step; forced steps come on top of the rate.
        return replace(base, gate=GateSettings("random", strength, options=(("force_first", True),)))
    settings = gate_settings(gate, pair)
    settings.check_rate(strength)
    # Calibrated per place: a threshold that holds the rate without latency need not hold it over a link.
    return replace(base, gate=settings, rate=strength)


def _checked(subject: Subject, strength: float) -> Driver:
    _check_range("a distance", strength, float("inf"))
    path = _path(subject, FLASH, 'block that drafts; train one with a recipe of kind = "flash"')
    rounds = replace(ROUNDS["flash_fitted"], within=strength) if strength else FULL
    return RoundsDriver(PairSource(path), rounds=rounds)


def _reused(subject: Subject, strength: float) -> Driver:
    _check_range("a share of tokens", strength)
    path = _path(subject, FREQCACHE, "refresh of its prefix; make one: specact export --refresh")
    reuse = Reuse(least=strength, most=strength, refreshed=0.0)
    rounds = ReusingRounds(ROUNDS["freqcache"].about, reuse=reuse) if strength else FULL
    return RoundsDriver(PairSource(path), rounds=rounds)


def _split(subject: Subject, strength: float) -> Driver:
    if not 0 <= strength <= subject.variants.stage_count:
        most = subject.variants.stage_count
        raise ConfigError(f"{subject.bundle.name!r} can be cut from 0 to {most}, not at {strength:g}")
    execution, stages = Execution("synchronous", subject.execute), str(subject.variants.stages())
    return SplitDriver(_path(subject), execution, stages=stages, cut=int(strength))


def _up_to(most: Callable[[Subject], int]) -> Callable[[Subject], tuple[float, ...]]:
    return lambda subject: tuple(map(float, range(most(subject) + 1)))


def _gate(about: str, gate: str, *, late: bool = False) -> Lever:
    return Lever(about, "pair", (1.0, 0.8, 0.6, 0.4, 0.2, 0.0), partial(_verified, gate, late), shares=True)


# By lever, some of which have the paper's names: the execution.
OVERLAPS: dict[str, tuple[Kind, str]] = {
    "naive": ("append", "append: the paper's naive asynchronous execution"),
    "aligned": ("aligned", "aligned execution, by timestamp"),
    "roll_forward": (
        "roll_forward", "roll-forward without fine-tuning: VLASH's policy is trained for it, this one is not"
    ),
    "inpainting": ("rtc", "rtc: real-time chunking, by inpainting"),
}  # fmt: skip
LEVERS = {
    "steps": Lever(
        "Euler steps of a flow policy", "flow", (10.0, 5.0, 3.0, 2.0, 1.0),
        lambda subject, strength: replace(subject.driver, steps=int(strength)),
    ),
    "flash": Lever(
        "distance within which FLASH's check accepts what its block drafts, at the fitted noise level; 0 denoises "
        "every chunk", "flow", (0.0, 0.2, 0.4, 0.8, 1.6), _checked, shares=True,
    ),
    "reuse": Lever(
        "share of the cameras' tokens that FreqCache may reuse; 0 computes all of them", "flow",
        (0.0, 0.25, 0.5, 0.75, 1.0), _reused, shares=True,
    ),
    "split": Lever(
        "stages of the target that run on a server, the others on the device (RoboECC); 0 for none", "codes",
        _up_to(lambda subject: subject.variants.stage_count), _split,
    ),
    "quantisation": Lever(
        "W8A8 (4) and W4A8 (8): weights with 4 or 8 times fewer bits than 32, activations with 8; 0 for neither",
        "policy", (0.0, 4.0, 8.0), _quantised,
    ),
    "window": Lever(
        "observations a VQ-BeT looks at", "codes",
        lambda subject: tuple(float(k) for k in range(_codes(subject).spec.target.history, 0, -1)), _windowed,
    ),
    **{
        name: Lever(
            f"{about}; actions that run during an inference", "policy", _up_to(lambda subject: subject.execute - 1),
            partial(_overlapped, kind),
        )
        for name, (kind, about) in OVERLAPS.items()
    },
    "verification": _gate("transmission rate of ADAHI; 1 is hybrid, 0 the draft alone", "adahi"),
    "late": _gate(
        "transmission rate; the verdict corrects the rest of the chunk when it arrives", "adahi", late=True
    ),
    "chance": _gate("transmission rate of a random gate", "random"),
    "learned": _gate("transmission rate of a learned gate, whose time is the device's", "learned"),
    "alone": Lever(
        "one policy on the device and no server; 0 the target, 1 the learned gate's head as the draft", "codes",
        (0.0, 1.0), _alone,
    ),
    "remote": Lever(
        "the target on a server, queried synchronously", "policy", (0.0,), partial(_remote, "synchronous")
    ),
    "remote_async": Lever(
        "the same, queried while the last actions run, played by time (as in LeRobot); number of those actions",
        "policy", lambda subject: (float(subject.execute // 2),), partial(_remote, "aligned"),
    ),
}  # fmt: skip
