"""docs/develop/protocol.md says what the code does: every message, array, code and example, and nothing else."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.serving import Here
from tests.wire.contracts import CHUNKS, CODES, FLOWS, TOKENS

from specact.load import load_pair
from specact.remote import endpoint
from specact.rng import Role, stream
from specact.server.access import Address
from specact.wire import messages

DOCUMENT = (Path(__file__).parents[2] / "docs" / "develop" / "protocol.md").read_text(encoding="utf-8")
ROBOT = Path(__file__).with_name("robot.mjs")
Row = tuple[str, str, str]  # name, type and meaning


def lists() -> dict[str, list[list[Row]]]:
    """The lists under each heading, or each sentence that says of which message the arrays are."""
    sections: dict[str, list[list[Row]]] = {}
    heading = ""
    for text in re.split(r"^(?=#)|\n\n", DOCUMENT, flags=re.MULTILINE):
        if text.startswith(("#", "Arrays of ")):
            heading = text.splitlines()[0].strip("# :").replace("`", "")
        rows = re.findall(r"^- `([^`]+)`(?:, (.+?))?: (.+)$", text, re.MULTILINE)
        if rows:
            sections.setdefault(heading, []).append(rows)
    return sections


LISTS = lists()


def names(rows: list[Row]) -> list[str]:
    return [row[0] for row in rows]


@pytest.mark.parametrize("message", [messages.Hello, messages.Welcome, messages.Ask, messages.Reply, messages.Failure])
def test_the_elements_of_a_message(message: Any) -> None:
    rows, *_ = LISTS[message.__struct_config__.tag or "request"]
    fields = msgspec.structs.fields(message)
    assert names(rows) == [field.name for field in fields]
    for (name, said, _), field in zip(rows, fields, strict=True):
        assert said.endswith(", optional") == (not field.required), name


def test_the_codes_and_the_version() -> None:
    assert names(LISTS["error"][1]) == list(messages.ErrorCode)
    assert f"protocol **{messages.PROTOCOL}**" in DOCUMENT and f"- `{messages.PATH}`: " in DOCUMENT
    assert f"port is {endpoint.PORT}." in DOCUMENT and Address().port == endpoint.PORT


HEADS = [match for head in LISTS if (match := re.fullmatch(r"Arrays of (the reply to )?(\w+)(?: of (\w+))?", head))]


@pytest.mark.parametrize("head", HEADS, ids=str)
def test_the_arrays_of_a_kind(head: re.Match[str]) -> None:
    reply, name, family = head.groups()
    kind = {"flows": FLOWS, "tokens": TOKENS, None: CHUNKS if name == "inpaint" else CODES}[family].kinds[name]
    (rows,), layout = LISTS[head[0]], kind.reply if reply else kind.request
    assert len(HEADS) == 8, "both sides of each kind that has arrays of its own"
    assert sorted(names(rows)) == sorted(layout.specs)
    for name, said, _ in rows:
        spec = layout.specs[name]
        assert said.split()[0] == ("distribution" if spec.distribution else np.dtype(spec.dtype).name)
        assert said.partition("]")[0].count(",") == len(spec.shape) - 1
    # The order of a list is that of the bytes among arrays whose elements have one length.
    order = {name: place for place, name in enumerate(names(rows))}
    sizes = [(-np.dtype(spec.dtype).itemsize, order[name]) for name, spec in layout.specs.items()]
    assert sizes == sorted(sizes)


def test_the_random_numbers_that_it_shows() -> None:
    assert str(stream(7, Role.VERIFY, robot=1, episode=2, step=3).random((2, 2)).tolist()) in DOCUMENT


def test_a_robot_in_another_language_gets_what_it_computes_itself() -> None:
    node = [shutil.which("node") or "node", "--experimental-websocket"]
    try:
        subprocess.run([*node, "-e", "WebSocket"], check=True, capture_output=True, timeout=60)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs node, 20.10 or later")
    ball = load_pair("ball")
    # One request per inference, whose last bits then do not depend on others.
    with Here(ball.exchange, max_batch=1) as server:
        command = [*node, ROBOT, f"ws://127.0.0.1:{server.port}", ball.parts.files["tokenizer"]]
        done = subprocess.run(command, text=True, capture_output=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    counts = json.loads(done.stdout)
    assert counts["codes"] == counts["chunks"] == 100 and 50 < counts["accepted"] < 190
