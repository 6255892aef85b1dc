"""The levers: methods that make inferences cheaper, hide their latency, or make them rarer, each with a strength."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from specact.errors import ConfigError, unknown_name
from specact.execution.strategy import Execution, Kind
from specact.families.chunks.bundle import FlowBundle
from specact.families.codes.bundle import Bundle
from specact.families.codes.head import load_head
from specact.families.flash.bundle import FLASH
from specact.families.flash.rounds import ROUNDS
from specact.families.freqcache.bundle import FREQCACHE
from specact.families.freqcache.cached import Reuse
from specact.gates.settings import BUNDLE_DEFAULTS, GateSettings
from specact.lab.tised.drivers import CodesDriver, Driver, FlowDriver, PairDriver, RoundsDriver, SplitDriver
from specact.lab.tised.settings import Setting, Subject
from specact.pair import Named


@dataclass(frozen=True)
class Lever:
    """A lever.

    Attributes:
        about: its effect, and the meaning of its strength.
        on: what it applies to: one policy, that of a flow bundle or the target of a pair of action codes; the flow; the
            pair of action codes; or a pair of any family with a draft.
        strengths: of a subject, the baseline (no effect) first.
        apply: makes driver and execution of a subject at a strength.
        shares: whether strengths are shares or distances; else they are integers.
        remote: see :class:`Setting`.
    """

    about: str
    on: Literal["policy", "flow", "codes", "pair"]
    strengths: Callable[[Subject], tuple[float, ...]]
    apply: Callable[[Subject, float], tuple[Driver, Execution | None]]
    shares: bool = False
    remote: bool = False

    def check(self, name: str, subject: Subject) -> None:
        """Checks that it applies to a subject.

        Raises:
            ConfigError: if that is the wrong kind of bundle.
        """
        kinds = _kinds(subject)
        if self.on not in kinds:
            fitting = [other for other, lever in LEVERS.items() if lever.on in kinds]
            raise ConfigError(
                f"lever {name!r} needs {KINDS[self.on]}, which {subject.bundle.name!r} is not; its levers are "
                f"{', '.join(fitting)}"
            )


KINDS = {
    "policy": "a flow policy or a pair of action codes", "flow": "a flow policy", "codes": "a pair of action codes",
    "pair": "a pair, which a token policy or a flow policy is with --draft",
}  # fmt: skip


def _kinds(subject: Subject) -> tuple[str, ...]:
    if isinstance(subject.bundle, FlowBundle):
        return "policy", "flow"
    return ("policy", "codes", "pair") if isinstance(subject.bundle, Bundle) else ("pair",)


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
    lever.check(name, subject)
    own = lever.strengths(subject)
    wanted = own if strengths is None else tuple(dict.fromkeys((own[0], *strengths)))
    for strength in wanted:
        if not (lever.shares or strength.is_integer()):
            raise ConfigError(f"a strength of lever {name!r} must be a whole number, got {strength:g}")
    return [Setting(name, strength, *lever.apply(subject, strength), remote=lever.remote) for strength in wanted]


def _flow(subject: Subject) -> FlowBundle:
    assert isinstance(subject.bundle, FlowBundle), "checked by Lever.check"
    return subject.bundle


def _synchronous(subject: Subject) -> Execution:
    return Execution("synchronous", subject.execute)


def _steps(subject: Subject, strength: float) -> tuple[Driver, Execution]:
    return FlowDriver(str(subject.bundle.path), steps=int(strength)), _synchronous(subject)


def _quantised(static: bool, subject: Subject, strength: float) -> tuple[Driver, Execution]:
    driver, tiers = subject.driver, subject.variants.tiers(static)
    if strength not in range(len(tiers) + 1):
        raise ConfigError(
            f"the strength of quantisation must be a tier from 1 to {len(tiers)}, or 0 for none; got {strength:g}"
        )
    if strength:
        files = subject.variants.quantised(tiers[int(strength) - 1])
        if isinstance(driver, FlowDriver):
            driver = replace(driver, parts=tuple((part, str(file)) for part, file in files.items()))
        else:
            driver = replace(driver, file=str(files["target"]))
    return driver, _synchronous(subject)


def _tiers(static: bool, subject: Subject) -> tuple[float, ...]:
    return tuple(map(float, range(len(subject.variants.tiers(static)) + 1)))


def _windowed(subject: Subject, strength: float) -> tuple[Driver, Execution]:
    bundle, driver = subject.bundle, subject.driver
    assert isinstance(bundle, Bundle), "checked by Lever.check"
    longest = bundle.spec.target.history
    if not 1 <= strength <= longest:
        raise ConfigError(f"{bundle.name!r} supports 1 to {longest} observations, got {strength:g}")
    if strength < longest:
        file = subject.variants.windowed(int(strength))
        driver = CodesDriver(str(bundle.path), file=str(file), window=int(strength))
    return driver, _synchronous(subject)


def _overlapped(kind: Kind, subject: Subject, strength: float) -> tuple[Driver, Execution]:
    # Without overlap all modes are synchronous.
    execution = Execution(kind, subject.execute, int(strength)) if strength else _synchronous(subject)
    return subject.driver, execution


def _alone(subject: Subject, strength: float) -> tuple[Driver, Execution]:
    bundle = subject.bundle
    assert isinstance(bundle, Bundle), "checked by Lever.check"
    if strength not in (0.0, 1.0):
        raise ConfigError(f"the policy alone on the device must be 0, the target, or 1, the head; got {strength:g}")
    if strength:
        # Fails early if the bundle has no head.
        load_head(bundle)
    return CodesDriver(str(bundle.path), role="head" if strength else "target"), _synchronous(subject)


def _remote(execution: Kind, subject: Subject, strength: float) -> tuple[Driver, Execution]:
    return subject.driver, Execution(execution, subject.execute, 0 if execution == "synchronous" else int(strength))


def _verified(gate: str, late: bool, subject: Subject, strength: float) -> tuple[Driver, None]:
    pair = subject.bundle
    assert not isinstance(pair, FlowBundle), "checked by Lever.check"
    if not 0.0 <= strength <= 1.0:
        raise ConfigError(f"a transmission rate must lie in [0, 1], got {strength:g}")
    base = PairDriver(str(pair.path), GateSettings("always"), late=late, named=Named.of(pair))
    if strength == 1.0:
        return base, None
    if strength == 0.0:
        return replace(base, gate=GateSettings("never")), None
    if gate == "random":
        # Like every gate, it sends an episode's first step; forced steps come on top of the rate.
        return replace(base, gate=GateSettings("random", strength, options=(("force_first", True),))), None
    settings = BUNDLE_DEFAULTS.settings(gate, pair)
    settings.check_rate(strength)
    # Calibrated per place: a threshold that holds the rate without latency need not hold it over a link.
    return replace(base, gate=settings, rate=strength), None


def _checked(subject: Subject, strength: float) -> tuple[Driver, None]:
    bundle = _flow(subject)
    if not strength >= 0.0:
        raise ConfigError(f"a distance must be at least 0, got {strength:g}")
    if not (bundle.path / FLASH).exists():
        raise ConfigError(f'{bundle.name!r} has no block that drafts; train one with a recipe of kind = "flash"')
    rounds = replace(ROUNDS["flash_fitted"], within=strength) if strength else ROUNDS["full"]
    return RoundsDriver(str(bundle.path), rounds), None


def _reused(subject: Subject, strength: float) -> tuple[Driver, None]:
    bundle = _flow(subject)
    if not 0.0 <= strength <= 1.0:
        raise ConfigError(f"a share of tokens must lie in [0, 1], got {strength:g}")
    if not (bundle.path / FREQCACHE).exists():
        raise ConfigError(f"{bundle.name!r} has no refresh of its prefix; make one: specact export --refresh")
    reuse = Reuse(least=strength, most=strength, refreshed=0.0)
    return RoundsDriver(
        str(bundle.path), replace(ROUNDS["freqcache"], reuse=reuse) if strength else ROUNDS["full"]
    ), None


def _split(subject: Subject, strength: float) -> tuple[Driver, Execution]:
    cuts = _cuts(subject)
    if strength not in cuts:
        raise ConfigError(f"{subject.bundle.name!r} can be cut from 0 to {cuts[-1]:g}, not at {strength:g}")
    return SplitDriver(str(subject.bundle.path), str(subject.variants.stages()), int(strength)), _synchronous(subject)


def _cuts(subject: Subject) -> tuple[float, ...]:
    return tuple(map(float, range(subject.variants.stage_count + 1)))


def _fixed(*strengths: float) -> Callable[[Subject], tuple[float, ...]]:
    return lambda subject: strengths


def _overlaps(subject: Subject) -> tuple[float, ...]:
    return tuple(float(m) for m in range(subject.execute))


def _windows(subject: Subject) -> tuple[float, ...]:
    assert isinstance(subject.bundle, Bundle), "checked by Lever.check"
    return tuple(float(k) for k in range(subject.bundle.spec.target.history, 0, -1))


LEVERS = {
    "steps": Lever("Euler steps of a flow policy", "flow", _fixed(10.0, 5.0, 3.0, 2.0, 1.0), _steps),
    "flash": Lever(
        "distance within which FLASH's check accepts what its block drafts, at the fitted noise level; 0 denoises "
        "every chunk", "flow", _fixed(0.0, 0.2, 0.4, 0.8, 1.6), _checked, shares=True,
    ),
    "reuse": Lever(
        "share of the cameras' tokens that FreqCache may reuse; 0 computes all of them", "flow",
        _fixed(0.0, 0.25, 0.5, 0.75, 1.0), _reused, shares=True,
    ),
    "split": Lever(
        "stages of the target that run on a server, the others on the device (RoboECC); 0 for none", "codes", _cuts,
        _split, remote=True,
    ),
    "quantisation": Lever(
        "networks of fewer bits, activations scaled as they come; the tier, 0 for none", "policy",
        partial(_tiers, False), partial(_quantised, False),
    ),
    "static_quantisation": Lever(
        "networks of fewer bits, activations scaled beforehand; the tier, 0 for none", "policy",
        partial(_tiers, True), partial(_quantised, True),
    ),
    "window": Lever("observations a VQ-BeT looks at", "codes", _windows, _windowed),
    **{
        kind: Lever(f"{kind}; actions that run during an inference", "policy", _overlaps, partial(_overlapped, kind))
        for kind in ("naive", "aligned", "roll_forward", "inpainting")
    },
    "verification": Lever(
        "transmission rate of ADAHI; 1 is hybrid, 0 the draft alone", "pair", _fixed(1.0, 0.8, 0.6, 0.4, 0.2, 0.0),
        partial(_verified, "deviation", False), shares=True,
    ),
    "late": Lever(
        "transmission rate; the verdict corrects the rest of the chunk when it arrives", "pair",
        _fixed(1.0, 0.8, 0.6, 0.4, 0.2, 0.0), partial(_verified, "deviation", True), shares=True,
    ),
    "chance": Lever(
        "transmission rate of a random gate", "pair", _fixed(1.0, 0.8, 0.6, 0.4, 0.2, 0.0),
        partial(_verified, "random", False), shares=True,
    ),
    "learned": Lever(
        "transmission rate of a learned gate, whose time is the device's", "pair", _fixed(1.0, 0.8, 0.6, 0.4, 0.2, 0.0),
        partial(_verified, "learned", False), shares=True,
    ),
    "alone": Lever(
        "one policy on the device and no server; 0 the target, 1 the learned gate's head as the draft", "codes",
        _fixed(0.0, 1.0), _alone,
    ),
    "remote": Lever(
        "the target on a server, queried synchronously", "policy", _fixed(0.0), partial(_remote, "synchronous"),
        remote=True,
    ),
    "remote_async": Lever(
        "the same, queried while the last actions run, played by time (as in LeRobot); number of those actions",
        "policy",
        lambda subject: (float(subject.execute // 2),), partial(_remote, "aligned"), remote=True,
    ),
}  # fmt: skip
