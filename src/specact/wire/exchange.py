"""What one exchange over the stream weighs."""

from __future__ import annotations

import numpy as np

from specact.families.codes.spec import PolicySpec
from specact.families.codes.values import CodeDistribution
from specact.types import Window
from specact.wire import msgpack
from specact.wire.reply import DistributionReply, ServerTimes, reply_fields
from specact.wire.request import InferRequest, request_fields


def exchange_bytes(spec: PolicySpec) -> int:
    """Bytes of a request and its reply; frames count as they are, uncompressed."""
    window = Window(
        np.zeros((spec.window, spec.state), np.float32),
        np.zeros(spec.goal, np.float32) if spec.goal else None,
        np.zeros((spec.window, *spec.image, 3), np.uint8) if spec.image else None,
    )
    answer = CodeDistribution(
        np.full((spec.codebooks, spec.codes), 1.0 / spec.codes),
        np.zeros((spec.codebooks, spec.codes, spec.chunk, spec.actions), np.float32),
        np.full((spec.codes, spec.codes), 1.0 / spec.codes) if spec.sequential else None,
    )
    request = request_fields(InferRequest(2**32, 1.0, window))
    reply = reply_fields(DistributionReply(2**32, answer, ServerTimes(1.0, 1.0, 1.0, 1)))
    return len(msgpack.encode(request)) + len(msgpack.encode(reply))
