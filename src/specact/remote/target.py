"""The target on a server: verification on the device, or on the server as in ADAHI's paper."""

from __future__ import annotations

from typing import Any, Generic, Literal, TypeVar

import numpy as np

from specact.errors import ConfigError
from specact.observation import Window
from specact.pair import Answer, Pair, Pending, Verifier, checked
from specact.records import validated
from specact.remote.client import Client
from specact.rng import StepAddress
from specact.types import Outcome, Proposal
from specact.wire.exchange import Exchange, Request, VerifyingExchange
from specact.wire.messages import Deadline

A = TypeVar("A")
E = TypeVar("E")


class _Remote(Generic[E]):
    @validated
    def __init__(self, client: Client, exchange: E, deadline_ms: Deadline) -> None:
        self._client, self._exchange, self._deadline_ms = client, exchange, deadline_ms


class RemoteTarget(_Remote[Exchange[A]]):
    """A :class:`~specact.pair.Target` on the client's server, whose replies have a deadline [ms] from their sending."""

    def submit(self, window: Window, address: StepAddress) -> Pending[Answer[A]]:
        reply = self._client.request("infer", Request(window, address), self._deadline_ms)
        return reply.then(lambda answer: Answer(self._exchange.read(answer[0]), answer[1]))


class RemoteVerifier(_Remote[VerifyingExchange[Any]]):
    """A :class:`~specact.pair.Verifier` on the server, as in ADAHI's paper: it samples what the device would have."""

    def submit(self, proposal: Proposal, address: StepAddress) -> Pending[Outcome]:
        request = Request(proposal.window, address, self._exchange.request(proposal))
        reply = self._client.request("verify", request, self._deadline_ms)
        return reply.then(lambda answer: checked(self._exchange.outcome(*answer), proposal))


@validated
def remote_verifier(
    client: Client, pair: Pair[Any], deadline_ms: Deadline, sampling: Literal["device", "server"] = "device"
) -> Verifier:
    """A pair's own verification, with the target on a server.

    With ``sampling`` on the server, as in ADAHI's paper, the outcome is the same. Families whose requests contain the
    draft, as that of token policies, always verify there. A place that the family does not support and a deadline that
    is not positive are a ConfigError; see also :func:`check_requests`.
    """
    exchange = pair.exchange
    if sampling == "device" and exchange.contract.step_kind == "infer":
        return pair.verifier(RemoteTarget(client, exchange, deadline_ms))
    if not isinstance(exchange, VerifyingExchange):
        raise ConfigError(
            f"the server cannot verify for the family {exchange.contract.family!r}: its target only answers; choose "
            "sampling on the device"
        )
    check_requests(pair, exchange, client)
    return RemoteVerifier(client, exchange, deadline_ms)


def check_requests(pair: Pair[Any], exchange: VerifyingExchange[Any], client: Client) -> None:
    """Refuses a pair whose proposals a server cannot verify, before a robot moves; drafts once.

    That is a decoding that only a target in this process can do, that lacks a part, or that asks for more Euler
    ``steps`` than the server states (ConfigError), and a draft with a network on the server alone (BundleError).
    """
    arrays = exchange.request(pair.drafter().propose(pair.observation.zeros(), np.random.default_rng(0)))
    most = None if client.welcome is None else client.welcome.spec.get("steps")
    if isinstance(most, int) and "steps" in arrays and (arrays["steps"] > most).any():
        raise ConfigError(
            f"the server takes {most} Euler steps at most, and this pair asks for {arrays['steps'].max()}; choose "
            "another --decoding, or start the server with more --steps"
        )
