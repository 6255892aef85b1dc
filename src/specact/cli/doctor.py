"""``specact doctor`` reports what is installed, inference times, and the latency of a server."""

from __future__ import annotations

import platform
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import distributions
from math import ceil
from typing import Any

import numpy as np
from rich.table import Table
from tyro.conf import Positional

from specact import __version__
from specact.cli.options import Access, ConfigFile, Flat, Maybe, Options, Parts
from specact.cli.output import lines_of, print_result, table_of
from specact.errors import ConfigError, RemoteError
from specact.imports import EXTRAS
from specact.pair import Pair
from specact.records import Count
from specact.remote.client import Client
from specact.rng import StepAddress
from specact.types import Miss, OffloadTimes
from specact.wire.exchange import Request


@dataclass(frozen=True)
class Doctor(Options):
    """Report the installed extras, the inference times of a pair and, with --server, the latency of its server.

    With the address of a server in place of the pair: the latency of a policy alone.
    """

    # path or name of a pair, or MODULE:NAME, whose target the server must serve; or ws://HOST:PORT of a policy alone
    pair: Positional[str] = "ball"
    server: Maybe[str] = None  # address to measure, such as ws://127.0.0.1:8600, or openpi:ws://HOST:PORT#FILE.toml
    requests: Maybe[Count] = None  # requests to send to it, at the pair's inference rate; 200 if not given
    access: Flat[Access] = field(default_factory=Access)
    config: ConfigFile = None  # file of options; what is typed goes first
    parts: Flat[Parts] = field(default_factory=Parts)
    json: bool = False  # print the findings as JSON

    def __post_init__(self) -> None:
        super().__post_init__()
        if "://" not in self.pair and self.server is None and (self.requests is not None or self.access != Access()):
            raise ConfigError("--requests, --token-file and --ca are for a server; add --server, or leave them out")

    def run(self) -> None:
        from specact.lab.evaluation.executions import executions

        if "://" in self.pair:
            findings = self._alone()
        else:
            pair = self.parts.load(self.pair)
            findings = _machine() | _inspect(pair)
            if self.server is not None:
                findings["server"] = self._measure(pair, self.server)
        if "server" in findings:
            findings["execution"] = executions(findings["server"]["stages_ms"]["total"]["p95"], findings["period_ms"])
        print_result(self.json, findings, _lines(findings))

    def _alone(self) -> dict[str, Any]:
        """What a server with a policy alone says of itself, and its latencies, as plain values."""
        from specact.families.chunks.remote import connect

        if self.server is not None:
            raise ConfigError(f"{self.pair} is a server's address already; leave out --server, or name a pair")
        access = self.access
        with connect(self.pair, token=access.token, ca=access.ca, robot="doctor", timeout=10.0) as remote:
            spec = remote.spec
            server = self._latencies(self.pair, remote.client, spec.chunk / spec.rate_hz / 2.0)
        return _machine() | {"chunk": spec.chunk, "period_ms": 1e3 / spec.rate_hz, "server": server}

    def _measure(self, pair: Pair[Any], server: str) -> dict[str, Any]:
        """Latencies of the server of a pair's target, as plain values."""
        contract = pair.exchange.contract
        with Client(self.access.endpoint(server, contract), contract, "doctor") as client:
            return self._latencies(server, client, pair.execute / pair.rate_hz)

    def _latencies(self, server: str, client: Client, pause_s: float) -> dict[str, Any]:
        welcome, requests = client.connect(10.0), self.requests or 200
        times = _probe(client, requests, pause_s)
        stages = ("total", "network", "queue", "target")
        latencies = {stage: 1e3 * np.array([getattr(offload, stage) for offload in times]) for stage in stages}
        return {
            "url": server, "bundle": welcome.bundle, "version": welcome.version, "requests": requests,
            "missed": requests - len(times), "deadline_ms": 1.2 * float(np.quantile(latencies["total"], 0.99)),
            "stages_ms": {
                stage: {f"p{share}": float(np.quantile(times, share / 100)) for share in (50, 95, 99)}
                for stage, times in latencies.items()
            },
        }  # fmt: skip


def _probe(client: Client, requests: int, pause_s: float) -> list[OffloadTimes]:
    """The times of those requests that are answered within two seconds; they are sent one by one, as by a robot."""
    request, times, causes = Request(client.contract.observation.zeros(), StepAddress(0, 0, 0, 0)), [], set[str]()
    for _ in range(requests):
        reply = client.request("infer", request, 2000.0, wait_if_busy=True).result()
        if isinstance(reply, Miss):
            causes.add(reply.cause if client.failure is None else f"{reply.cause}: {client.failure}")
        else:
            times.append(reply[1])
        time.sleep(pause_s)
    if not times:
        raise RemoteError(f"none of {requests} requests was answered: {', '.join(sorted(causes))}")
    return times


def _machine() -> dict[str, Any]:
    """What this machine has."""
    import onnxruntime

    installed = {name.lower().replace("_", "-") for dist in distributions() if (name := dist.name)}
    return {
        "specact": __version__, "python": platform.python_version(), "machine": platform.machine(),
        "providers": onnxruntime.get_available_providers(),
        "missing": {
            extra: [package for package in packages.values() if package not in installed]
            for extra, packages in EXTRAS.items()
        },
    }  # fmt: skip


def _inspect(pair: Pair[Any]) -> dict[str, Any]:
    """How long a pair's networks take on this machine."""
    from specact.families.codes.pair import CodeParts
    from specact.lab.evaluation.cost import median_ms

    drafter, rng, window = pair.drafter(), np.random.default_rng(0), pair.observation.zeros()
    findings = {
        "bundle": str(pair.path), "fingerprint": pair.fingerprint,
        "draft_ms": median_ms({0: lambda: drafter.propose(window, rng)})[0],
        "period_ms": 1e3 / pair.rate_hz, "execute": pair.execute,
    }  # fmt: skip
    if isinstance(pair.parts, CodeParts) and (target := pair.parts.local_target) is not None:
        findings["target_ms"] = median_ms({0: lambda: target.infer(window)})[0]
    return findings


def _lines(findings: dict[str, Any]) -> Iterator[str | Table]:
    missing = {extra: names for extra, names in findings["missing"].items() if names}
    yield from lines_of(findings | {"missing": missing, "execution": None})
    for extra in missing:
        yield f"for what is missing of {extra}: pip install 'specact[{extra}]'"
    yield from advice(findings)
    if "execution" in findings:
        yield from execution_lines(findings["execution"])


def execution_lines(executions: Mapping[str, Any]) -> Iterator[str | Table]:
    """What :func:`~specact.lab.evaluation.executions.executions` advises, and the table it rests on."""
    delay = executions["delay"]
    yield f"a chunk can be played so many control steps after its observation: {delay}; enough for that is:"
    yield from (f"  {sentence}" for sentence in executions["advice"])
    if rows := executions["rows"]:
        yield table_of("", rows, {"task": "task", **{name: name for name in rows[0]}})


def advice(findings: dict[str, Any]) -> Iterator[str]:
    """What the latencies of a server mean for a pair, or for a policy alone."""
    if (server := findings.get("server")) is None:
        return
    if (chunk := findings.get("chunk")) is None:
        yield f"advice: --deadline-ms {server['deadline_ms']:.3g}"
        if (needed := server["deadline_ms"]) > (period := findings["period_ms"]):
            yield f"this is longer than the control period of {period:.0f} ms: verified steps delay the control loop"
            later = findings["execute"] - 1
            if needed < later * period:
                yield f"advice: --execution late, for which a verdict may take {later * period:.0f} ms"
            else:
                slower = f"lower --rate-hz to {1e3 * later / needed:.2g}, " if later else ""
                yield (
                    f"even late verdicts may take only {later * period:.0f} ms: {slower}use a faster link, or play a "
                    "target that is a chunk policy alone: specact play, --execution aligned"
                )
        return
    periods = ceil(server["deadline_ms"] / findings["period_ms"])
    if periods < chunk:
        yield f"advice: --execution aligned --execute-actions {chunk} --overlap-actions {periods}"
    else:
        yield f"a chunk of {chunk} actions has run out when the next one comes: the robot will wait for each of them"
