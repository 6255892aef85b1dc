"""Wire format of FLASH: a drafted chunk with the settings of its check, and the round's chunk as the reply.

It extends the wire format of chunk policies, which clients without rounds can use, by requests to verify. The server is
stateless: every check computes a new prefix cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import numpy as np

from specact.errors import ConfigError, WireError
from specact.families.chunks.policy import ChunkSpec
from specact.families.chunks.wire import ChunkExchange
from specact.families.flash.check import Check
from specact.families.flash.verify import FlashTarget, Round, RoundRequest, round_outcome
from specact.types import OffloadTimes, Outcome, Proposal
from specact.units import ActionUnits
from specact.wire.arrays import Arrays, ArraySpec, Layout
from specact.wire.exchange import Kind, Request
from specact.wire.messages import bad

# Maximum of noise levels and of Euler steps of one request.
MAX_LEVELS, MAX_STEPS = 4, 100
# Kinds of a request; the numbers are part of the wire format.
_FULL, _TARGET_DRAFTS, _DRAFTED = 0, 1, 2
# Marks a gripper of unknown state.
_UNKNOWN = -1


class FlashExchange(ChunkExchange):
    """See :class:`~specact.wire.exchange.VerifyingExchange`; the check is the server's.

    Args:
        spec: of the target.
        units: of the actions.
        execute: maximum number of executed actions of a chunk.
        name, fingerprint: of the target.
        target: makes the target; called on a server only.
    """

    def __init__(
        self, spec: ChunkSpec, units: ActionUnits, execute: int, name: str, fingerprint: str,
        target: Callable[[], FlashTarget],
    ) -> None:  # fmt: skip
        super().__init__(spec, name, fingerprint, lambda: target().policy)
        self.contract = replace(
            self.contract, kinds={**self.contract.kinds, "verify": _verification(spec)}, step_kind="verify"
        )
        self._spec, self._units, self._execute, self._rounds = spec, units, execute, cache(target)

    @property
    def steady(self) -> bool:
        """A full round takes several times as long as a check."""
        return False

    def request(self, proposal: Proposal) -> Arrays:
        asked: RoundRequest = proposal.evidence.question
        spec, levels = self._spec, np.zeros(MAX_LEVELS, np.float32)
        if asked.stale or asked.shuffled or asked.parts is not None or len(asked.check.levels) > MAX_LEVELS:
            raise ConfigError(
                f"a server keeps no cache of a robot and checks at {MAX_LEVELS} noise levels at most; choose other "
                "rounds than flash_stale, flash_shuffled and freqcache, or a target in this process"
            )
        levels[: len(asked.check.levels)] = asked.check.levels
        held = np.full(spec.actions, _UNKNOWN, np.int16)
        if asked.held is not None:
            held[: len(asked.held)] = asked.held
        kind = _FULL if asked.full else _TARGET_DRAFTS if asked.drafted is None else _DRAFTED
        nothing = np.zeros((spec.chunk, spec.actions), np.float32)
        return {
            "drafted": nothing if asked.drafted is None else asked.drafted,
            "levels": levels,
            "within": np.array([asked.check.within], np.float32),
            "held": held,
            "how": np.array([kind, asked.check.guarded, asked.steps], np.int16),
        }

    def outcome(self, arrays: Arrays, times: OffloadTimes) -> Outcome:
        accepted, checked, switches = arrays["how"].tolist()
        found = Round(
            arrays["chunk"], min(accepted, self._execute), bool(checked), bool(switches), np.zeros((0, 0), np.float32)
        )
        return round_outcome(found, self._units, self._execute, times)

    def answer(self, kind: str, requests: Sequence[Request]) -> list[Arrays | WireError]:
        """See :class:`~specact.wire.exchange.Exchange`; rounds are computed one after the other."""
        return [self._round(request) for request in requests] if kind == "verify" else super().answer(kind, requests)

    def _round(self, request: Request) -> Arrays | WireError:
        kind, guarded, steps = request.arrays["how"].tolist()
        if kind > _DRAFTED or not 1 <= steps <= MAX_STEPS:
            return bad(f"how must name a kind of 0 to {_DRAFTED} and 1 to {MAX_STEPS} steps, got {kind} and {steps}")
        target = self._rounds()
        if kind == _TARGET_DRAFTS and target.block is None:
            return bad("this server's target has no block that drafts; start it with a bundle that has one")
        arrays = request.arrays
        levels = tuple(arrays["levels"][arrays["levels"] > 0.0].tolist())
        held = arrays["held"][: len(target.settings.grippers)]
        try:
            check = Check(levels or (1.0,), float(arrays["within"][0]), bool(guarded))
        except ConfigError as error:
            return bad(str(error))
        found = target.answer(request.window, request.address).round(
            RoundRequest(
                kind == _FULL, arrays["drafted"] if kind == _DRAFTED else None, check, steps,
                None if (held == _UNKNOWN).any() else held.astype(bool),
            )
        )  # fmt: skip
        return {"chunk": found.chunk, "how": np.array([found.accepted, found.checked, found.switches], np.int16)}


def _verification(spec: ChunkSpec) -> Kind:
    chunk = ArraySpec((spec.chunk, spec.actions), np.float32)
    return Kind(
        Layout(
            {
                "drafted": chunk,
                "levels": ArraySpec((MAX_LEVELS,), np.float32, 0.0, 1.0),
                "within": ArraySpec((1,), np.float32, 0.0),
                "held": ArraySpec((spec.actions,), np.int16, _UNKNOWN, 1),
                "how": ArraySpec((3,), np.int16, 0, np.iinfo(np.int16).max),
            }
        ),
        Layout({"chunk": chunk, "how": ArraySpec((3,), np.int16, 0, spec.chunk)}),
    )
