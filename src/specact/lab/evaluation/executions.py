"""Which execution is enough at a delay: the simplest that success in the study of delays does not speak against."""

from __future__ import annotations

import json
from math import ceil
from pathlib import Path
from typing import Any

# Of every task: what was measured, and rows of a method, its delay in control steps, and success with its interval.
# ``python -m experiments delay page`` writes it.
TABLE = Path(__file__).with_name("executions.json")
# The methods that are advised and how they are typed, the simplest first.
WAYS = {
    "synchronous": "--execution synchronous, none of the others is needed",
    "append": "specact play --execution append, none of the others is needed",
    "aligned": "specact play --execution aligned",
    "roll_forward": "specact play --execution roll_forward",
    "rtc": "specact play --execution rtc",
    "rtc_trained": "specact play --execution rtc with a policy that is trained for delays",
    "draft": "a draft on the device alone, without a server",
    "corrected": "specact run --execution corrected, with a corrector",
}
SHOWN = {"method": "method", "delay": "delay", "success": "success", "low": "low", "high": "high"}
# Of success that the simplest may lack on average, as in specact advise.
_MARGIN = 0.05


def executions(reply_ms: float, period_ms: float) -> dict[str, Any]:
    """The execution that is enough for replies of this time, at the delay d = ceil(reply / period) in control steps.

    Enough is the simplest method of which success is at most .05 below the best, and whose 95 % interval reaches that
    of the best; a delay between two measured ones counts as the longer. By task ``advice``, and the ``rows`` it rests
    on.
    """
    delay, advice, rows = ceil(reply_ms / period_ms), [], []
    for task, study in json.loads(TABLE.read_text()).items():
        keyed = [dict(zip(SHOWN, row, strict=True)) for row in study["rows"] if row[0] in WAYS]
        longer = [row["delay"] for row in keyed if row["delay"] >= delay]
        measured = [row for row in keyed if longer and row["delay"] == min(longer)]
        rows += [{"task": task, **row} for row in measured]
        best = max(measured, key=lambda row: row["success"], default=None)
        if best is None or best["success"] < 0.5:
            known = f"nothing works at a delay of {min(longer)}" if best else "so long a delay was not measured"
            advice.append(f"{task}: {known}; take a nearer server, fewer Euler steps or a smaller policy")
            continue
        close = [row for row in measured if best["success"] - row["success"] <= _MARGIN and row["high"] >= best["low"]]
        row = min(close, key=lambda row: [*WAYS].index(row["method"]))
        advice.append(
            f"{task}: {WAYS[row['method']]}, success {row['success']:.2f} [{row['low']:.2f}, {row['high']:.2f}] at a "
            f"delay of {row['delay']} ({study['about']})"
        )
    return {"delay": delay, "advice": advice, "rows": rows}
