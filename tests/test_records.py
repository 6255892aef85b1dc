from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest

from specact.errors import BundleError, ConfigError
from specact.records import Count, Positive, Record, Share, check_fields, read_json, read_record, read_toml


class Part(Record, frozen=True):
    count: Count = 1
    share: Share | None = None
    kind: Literal["small", "large"] = "small"
    sizes: tuple[int, ...] = ()
    corner: tuple[int, int] = (1, 2)


class Whole(Record, frozen=True):
    name: str
    parts: dict[str, Part] = msgspec.field(default_factory=dict)
    first: Part | None = None


REFUSED: dict[str, tuple[Any, tuple[str, ...]]] = {
    "another type": ({"name": 1}, ("name", "a text", "1")),
    "a missing key": ({}, ("name",)),
    "an unknown key": ({"nam": "x"}, ("'nam'", "did you mean 'name'")),
    "an unknown key in a table": ({"name": "x", "first": {"cuont": 1}}, ("first", "did you mean 'count'")),
    "out of range": ({"name": "x", "first": {"count": 0}}, ("first.count", ">= 1", "0")),
    "in one of several tables": ({"name": "x", "parts": {"a": {}, "b": {"count": 0}}}, ("parts.b.count", ">= 1")),
    "an unknown value": ({"name": "x", "first": {"kind": "larg"}}, ("first.kind", "did you mean 'large'")),
    "an entry of a list": ({"name": "x", "first": {"sizes": [1, "s"]}}, ("first.sizes[1]", "a whole number", "'s'")),
    "a list of another length": ({"name": "x", "first": {"corner": [1]}}, ("first.corner", "length 2")),
    "a boolean as a number": ({"name": "x", "first": {"count": True}}, ("first.count", "True")),
    "no number": ({"name": "x", "first": {"share": float("nan")}}, ("share",)),
    "no table": (5, ("a table", "5")),
}


@pytest.mark.parametrize("case", REFUSED)
def test_errors_name_the_path_what_is_allowed_and_what_was_there(case: str) -> None:
    values, named = REFUSED[case]
    with pytest.raises(ConfigError) as refused:
        read_record(values, Whole, "whole.toml")
    assert all(word in str(refused.value) for word in ("whole.toml", *named)), refused.value


def test_values_are_converted(tmp_path: Path) -> None:
    (tmp_path / "whole.toml").write_text('name = "x"\n[parts.a]\nsizes = [1, 2]\nshare = 1\n')
    assert read_toml(tmp_path / "whole.toml", Whole, "recipe") == Whole("x", {"a": Part(sizes=(1, 2), share=1.0)})


def test_constructed_records_are_checked_as_well() -> None:
    with pytest.raises(ConfigError, match="count"):
        Part(count=0)
    with pytest.raises(ConfigError, match=r"corner\[1\]"):
        Part(corner=(1, "2"))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="share"):
        Part(share=float("inf"))


def test_dataclasses_can_be_checked_by_their_annotations() -> None:
    @dataclass(frozen=True)
    class Options:
        rate: Positive = 1.0

    check_fields(Options())
    with pytest.raises(ConfigError, match="rate"):
        check_fields(Options(float("nan")))


@pytest.mark.parametrize("text", ["{", "[" * 100_000, "1" * 5000, "\xff", b"\xff\xfe\x00"])
def test_text_that_is_no_json_is_an_error_of_the_given_kind(text: Any) -> None:
    with pytest.raises(BundleError, match=r"whole\.json"):
        read_json(text, Whole, "whole.json", BundleError)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    for content in (None, b"\xff", b"= 1"):
        path = tmp_path / "whole.toml"
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(ConfigError, match=r"whole\.toml"):
            read_toml(path, Whole, "recipe")
