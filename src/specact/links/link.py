"""Links by name: presets, recordings, and their modifiers."""

from __future__ import annotations

import re

from specact.errors import ConfigError, unknown_name
from specact.links.model import AddedDelay, Link, LossyLink, OutageLink, SteadyLink, load_recording

LINKS: dict[str, SteadyLink] = {
    # Draft and target on one machine.
    "loopback": SteadyLink(rtt_ms=0.0, jitter_ms=0.0, up_mbit_s=1e6, down_mbit_s=1e6),
    # Measured in ADAHI's test bed on 802.11ac. The uplink rate is not published; we use the same value.
    "wifi-paper": SteadyLink(rtt_ms=12.054, jitter_ms=0.302, up_mbit_s=55.4, down_mbit_s=55.4),
    # Gigabit Ethernet carries 1448 bytes of TCP payload in 1538 bytes on the wire: 941 Mbit/s. Round trip and jitter
    # are chosen, for one or two switches.
    "lan": SteadyLink(rtt_ms=0.4, jitter_ms=0.05, up_mbit_s=941.0, down_mbit_s=941.0),
    # Rates: the user experienced data rates that IMT-2020 requires in a dense city (Report ITU-R M.2410-0, 4.3). Round
    # trip and jitter are chosen, for a server at the network's edge; the radio's share is 4 ms each way (4.7.1).
    "5g": SteadyLink(rtt_ms=20.0, jitter_ms=4.0, up_mbit_s=50.0, down_mbit_s=100.0),
    # Rates: medians measured by Huang et al. (MobiSys 2012). Round trip and jitter are chosen.
    "lte": SteadyLink(rtt_ms=50.0, jitter_ms=10.0, up_mbit_s=6.0, down_mbit_s=13.0),
}
_RECORDINGS = ("rtt:PATH", "mahimahi:UP_PATH,DOWN_PATH")
_MODIFIERS = ("delay", "loss", "outage", "period", "rate", "rto", "start")
_MODIFIER = re.compile(r"\+([A-Za-z_]+)=([^+]*)$")


def load_link(name: str) -> Link:
    """Loads a link by name.

    The name is ``NAME[+KEY=VALUE]...``: one of :data:`LINKS`, ``rtt:PATH`` or ``mahimahi:UP_PATH,DOWN_PATH``, and keys,
    each at most once except ``outage``: ``delay`` of a round trip [ms] and ``rate`` [Mbit/s], in front of the link;
    ``loss`` of segments in [0, 1), with ``rto`` [ms], 200; ``outage``, START:DURATION [s]; ``start`` within a recording
    [s]; ``period`` of ``rtt:`` [ms]. Delay and rate are applied first, then losses, then outages, as in
    ``wifi-paper+loss=0.3+outage=5:3``.

    Raises:
        ConfigError: for an unknown name or key, a value outside its range, or a file that cannot be used.
    """
    base, given = _split(name)
    numbers = {key: _number(key, values[0]) for key, values in given.items() if key != "outage"}
    link: Link = _base(base, numbers)
    if "delay" in numbers or "rate" in numbers:
        link = AddedDelay(link, numbers.get("delay", 0.0), numbers.get("rate"))
    if "loss" in numbers:
        link = LossyLink(link, numbers["loss"], numbers.get("rto", 200.0))
    elif "rto" in numbers:
        raise ConfigError("rto= is the timeout after a lost segment; add loss=PROBABILITY")
    if "outage" in given:
        link = OutageLink(link, tuple(_outage(value) for value in given["outage"]))
    return link


def _split(name: str) -> tuple[str, dict[str, list[str]]]:
    """The name without modifiers, and the values of each modifier, unparsed."""
    base, given = name, dict[str, list[str]]()
    while match := _MODIFIER.search(base):
        key, value = match.groups()
        if key not in _MODIFIERS:
            raise unknown_name("link modifier", key, _MODIFIERS)
        if key in given and key != "outage":
            raise ConfigError(f"{key}= is given twice for link {name!r}; once is allowed")
        given.setdefault(key, []).append(value)
        base = base[: match.start()]
    return base, given


def _base(name: str, numbers: dict[str, float]) -> Link:
    """The preset or recording, with the modifiers of a recording applied."""
    kind, colon, rest = name.partition(":")
    for key, kinds in {"start": ("rtt", "mahimahi"), "period": ("rtt",)}.items():
        if key in numbers and not (colon and kind in kinds):
            raise ConfigError(f"{key}= belongs to a recorded link ({' or '.join(kinds)}:...), not to {name!r}")
    paths = rest.split(",") if kind == "mahimahi" else [rest]
    if colon and kind == "mahimahi" and (len(paths) != 2 or not all(paths)):
        raise ConfigError(f"a mahimahi link needs two files, mahimahi:UP_PATH,DOWN_PATH; got {name!r}")
    if colon and kind in ("rtt", "mahimahi"):
        return load_recording(paths, numbers.get("period"), numbers.get("start", 0.0))
    if name not in LINKS:
        raise unknown_name("link", name, [*LINKS, *_RECORDINGS])
    return LINKS[name]


def _number(key: str, value: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise ConfigError(f"{key}= of a link must be a number, got {value!r}") from None


def _outage(value: str) -> tuple[float, float]:
    start, colon, duration = value.partition(":")
    if not colon:
        raise ConfigError(f"outage= of a link must be START:DURATION in seconds, as in outage=5:3; got {value!r}")
    return _number("outage", start), _number("outage", duration)
