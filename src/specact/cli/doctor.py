"""``specact doctor`` reports what is installed, inference times, and the latency of a server."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from specact.cli.options import refuse_unused
from specact.cli.output import print_json, results
from specact.cli.serve import read_token
from specact.errors import ConfigError
from specact.extras import EXTRAS

if TYPE_CHECKING:
    from specact.families.load import AnyPair


_REQUESTS = 200


def doctor(
    bundle: str = "ball",
    draft: str | None = None,
    server: str | None = None,
    requests: int = _REQUESTS,
    token_file: Path | None = None,
    ca: Path | None = None,
    json: bool = False,
) -> None:
    """Report the installed extras, the inference times of a pair and, with --server, the latency of its server.

    Args:
        bundle: path or name of a pair, or MODULE:NAME for one of your own; the server must serve its target.
        draft: of a pair of chunk policies, where the pair does not hold it: MODULE:NAME or a .toml file.
        server: address of the server to measure, such as ws://127.0.0.1:8600, or openpi:ws://HOST:PORT#FILE.toml for a
            server of openpi's protocol.
        requests: with --server: number of requests to send, at the pair's inference rate.
        token_file: with --server: file with its bearer token; the variable SPECACT_TOKEN if not given.
        ca: with --server: PEM file of the authority that signed its certificate.
        json: print the findings as JSON.
    """
    import onnxruntime

    from specact import __version__
    from specact.families.codes.bundle import Bundle
    from specact.families.codes.timing import measure_call, measure_inference
    from specact.families.load import load_pair

    if requests < 1:
        raise ConfigError(f"--requests must be at least 1, got {requests}")
    if server is None:
        refuse_unused(
            {"requests": requests != _REQUESTS, "token_file": token_file is not None, "ca": ca is not None},
            "is for --server; add that, or leave it out",
        )
    pair = load_pair(bundle, draft=draft)
    drafter, rng = pair.drafter, np.random.default_rng(0)
    missing = {
        extra: [name for name in packages.values() if not _installed(name)] for extra, packages in EXTRAS.items()
    }
    findings: dict[str, Any] = {
        "specact": __version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "providers": onnxruntime.get_available_providers(),
        "missing": missing,
        "bundle": str(pair.path),
        "fingerprint": pair.fingerprint,
        "draft_ms": 1e3 * measure_call(lambda window: drafter.propose(window, rng), pair.observation.zeros()),
        "period_ms": 1e3 / pair.rate_hz,
    }
    if isinstance(pair, Bundle) and pair.local_target is not None:
        findings["target_ms"] = 1e3 * measure_inference(pair.local_target, pair.spec.target)
    if server is not None:
        findings["server"] = _measure(pair, server, requests, read_token(token_file), ca)
    if json:
        print_json(findings)
        return
    for name, value in findings.items():
        if name not in ("missing", "server"):
            shown = f"{value:.3f}" if isinstance(value, float) else value
            results.print(f"{name:12} {shown}", highlight=False, soft_wrap=True)
    for extra, names in missing.items():
        state = f"missing {', '.join(names)}; pip install 'specact[{extra}]'" if names else "complete"
        results.print(f"extra {extra:6} {state}", highlight=False, soft_wrap=True)
    if server is not None:
        _print(findings["server"], findings["period_ms"])


def _measure(pair: AnyPair, server: str, requests: int, token: str | None, ca: Path | None) -> Any:
    """Latencies of a server and the link to it, as plain values."""
    from specact.families.chunks.openpi import target_endpoint
    from specact.remote.client import Client
    from specact.remote.probe import probe
    from specact.remote.transport import tls_context

    dialect = pair.codec.dialect
    with Client(target_endpoint(server, token, tls_context(ca), dialect), dialect, "doctor") as client:
        welcome = client.connect(10.0)
        found = probe(client, requests, pair.execute / pair.rate_hz)
    stages = {"total": found.total_ms, "network": found.network_ms, "queue": found.queue_ms, "target": found.target_ms}
    return {
        "url": server,
        "bundle": welcome.bundle,
        "version": welcome.version,
        "requests": requests,
        "lost": found.lost,
        "deadline_ms": found.deadline_ms,
        "stages_ms": {
            name: dict(zip(("p50", "p95", "p99"), np.quantile(values, (0.5, 0.95, 0.99)).tolist(), strict=True))
            for name, values in stages.items()
        },
    }


def _print(server: dict[str, Any], period_ms: float) -> None:
    results.print(f"server       {server['url']}: {server['bundle']}, specact {server['version']}", highlight=False)
    for stage, times in server["stages_ms"].items():
        shown = "  ".join(f"{name} {value:8.3f} ms" for name, value in times.items())
        results.print(f"  {stage:10} {shown}", highlight=False)
    deadline_ms = server["deadline_ms"]
    results.print(
        f"  {server['lost']} of {server['requests']} requests were lost; advice: --deadline-ms {deadline_ms:.3g}",
        highlight=False,
    )
    if deadline_ms > period_ms:
        results.print(
            f"  this is longer than the control period of {period_ms:.0f} ms: verified steps delay the control loop; "
            "lower --rate or use a faster link",
            style="yellow",
        )


def _installed(name: str) -> bool:
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True
