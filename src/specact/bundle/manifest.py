"""A bundle's manifest: what it is, its spec, and the fingerprints of its parts."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import stat
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from specact.bundle.vetting import remember
from specact.errors import BundleError, ConfigError
from specact.files import write_json
from specact.records import Record, Size, check_fields, read_json, read_record

FORMAT = 2
MANIFEST = "manifest.json"
# File of the weights that several networks of a policy share.
WEIGHTS = "weights.safetensors"
# Maximum size of a bundle's JSON files, and of its other files: a protocol buffer's limit.
MAX_JSON_BYTES, MAX_PART_BYTES = 1 << 24, (1 << 31) - 1

Kind = Literal["pair", "flow", "regression", "tokens", "drafters", "flash", "freqcache", "chunks", "split", "corrector"]
KINDS: dict[Kind, str] = {
    "pair": "a pair of draft and target",
    "flow": "a flow policy",
    "regression": "a policy by regression, a draft for specact pair",
    "tokens": "a token policy",
    "drafters": "drafters of a token policy",
    "flash": "the drafting block of a flow policy",
    "freqcache": "the refresh of a flow policy's prefix",
    "chunks": "a pair of chunk policies",
    "corrector": "a corrector of a policy's chunks",
    "split": "a target in stages, which specact split writes and specact serve serves",
}
# The part that a device does not need whose server has it.
LEFT_OUT: dict[str, str] = {"pair": "target", "tokens": "decoder"}

Name = Annotated[str, Meta(pattern="^[A-Za-z0-9][A-Za-z0-9._+-]{0,63}$")]
FileName = Annotated[str, Meta(pattern="^[A-Za-z0-9][A-Za-z0-9._-]*$")]
Values = dict[str, Any]
# Name of the instruction among a network's inputs.
INSTRUCTION = "instruction"
# Token ids of an instruction: padding, an unknown word, and the first word of the vocabulary.
_PADDING, _UNKNOWN, _FIRST_WORD = 0, 1, 2


class Words(Record, frozen=True):
    """A policy's vocabulary: lower-case words, each once; of an instruction the first L, its ``length``, are read."""

    vocabulary: Annotated[tuple[str, ...], Meta(max_length=1 << 16)]
    length: Annotated[int, Meta(ge=1, le=256)]

    def __post_init__(self) -> None:
        check_fields(self)
        if len(set(self.vocabulary)) != len(self.vocabulary):
            raise ConfigError("a vocabulary has each of its words once")

    @classmethod
    def from_instructions(cls, instructions: Iterable[str]) -> Words:
        """The vocabulary of some instructions, with the length of the longest one."""
        split = [_split(text) for text in instructions]
        return cls(tuple(sorted({word for words in split for word in words})), max([1, *map(len, split)]))

    @property
    def size(self) -> int:
        """Number of token ids: the words, one for padding, one for unknown words."""
        return len(self.vocabulary) + _FIRST_WORD

    def numbers(self, instructions: Sequence[str | None]) -> NDArray[np.int64]:
        """Token ids of B instructions, ``[B, L]``: 0 is padding, 1 an unknown word."""
        known = {word: number for number, word in enumerate(self.vocabulary, _FIRST_WORD)}
        rows = np.full((len(instructions), self.length), _PADDING, np.int64)
        for row, text in zip(rows, instructions, strict=True):
            words = _split(text or "")[: self.length]
            row[: len(words)] = [known.get(word, _UNKNOWN) for word in words]
        return rows


def _split(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


class Manifest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A manifest; entries that are not listed are ignored.

    Attributes:
        env: name of the environment it was made for; empty if there was none.
        fingerprints: by part. They identify the bundle; a copy that leaves parts out (``left_out``) has the same.
        shared: the parts that lie in another bundle beside this one: part to the name of that folder.
        files: fingerprints of the files, for parts with weights in a file of their own; otherwise each part is one
            file with the part's fingerprint. That of a learned gate's ``head`` is not part of the bundle's.
        sources, steps, units: of a pair of chunk policies; of a corrector sources alone.
        specact, recipe, policies, training, parity, parameters, distilled, target, check: how it was made.
    """

    format: Literal[2]
    name: Name
    env: str
    spec: Values
    fingerprints: dict[Name, str]
    kind: Kind = "pair"  # manifests of pairs have no kind
    left_out: tuple[str, ...] = ()
    shared: dict[Name, Name] = {}
    files: dict[FileName, str] = {}
    head: str = ""
    gates: Values = {}
    words: Words | None = None
    sources: dict[str, str | None] = {}
    steps: dict[str, Size] = {}
    units: Values = {}
    specact: str = ""
    recipe: Values = {}
    policies: Values = {}
    training: Values = {}
    parity: Values = {}
    parameters: dict[str, int] = {}
    distilled: Values = {}
    target: Values = {}
    check: Values = {}

    def values(self) -> Values:
        """As plain values, without entries that are empty."""
        values: Values = msgspec.to_builtins(self)
        return values


def read_manifest(path: Path) -> Manifest:
    """The manifest of a bundle's folder; BundleError if it cannot be read, or an entry is missing or not allowed."""
    file = path / MANIFEST
    if not file.exists():
        raise BundleError(
            f"{path} is not a bundle: it has no {MANIFEST}; name the bundle's own folder, as in RUN/bundles/NAME"
        )
    values = read_json(read_part(file, MAX_JSON_BYTES), Values, str(file), BundleError)
    if values.get("format", FORMAT) != FORMAT:
        raise BundleError(
            f"{file} has format {values['format']!r:.20}, this version reads {FORMAT}; export it again with it"
        )
    manifest = read_record(values, Manifest, str(file), BundleError)
    allowed = LEFT_OUT.get(manifest.kind)
    if manifest.left_out not in ((), (allowed,)):
        raise BundleError(f"{file}: left_out may only be [{allowed or ''}], got {list(manifest.left_out)}")
    return manifest


def write_manifest(path: Path, manifest: dict[str, Any], spec: object, parts: Mapping[str, str]) -> None:
    """Adds format, spec and the fingerprints of the parts in ``path`` to a manifest, and writes it."""
    networks = {part: [file] for part, file in parts.items() if file.endswith(".onnx")}
    for part, files in networks.items():
        files += [file for file in weights_of(part) if (path / file).is_file() and file not in parts.values()]
    digests = {file: digest_of(path / file) for file in {*parts.values(), *chain(*networks.values())}}
    values: Values = {"spec": msgspec.to_builtins(spec, enc_hook=dict)}  # the hook is for mappings
    values["fingerprints"] = {part: digests[file][:16] for part, file in parts.items()}
    if len(digests) > len(parts):
        values["files"] = {file: digests[file][:16] for file in sorted(digests)}
    write_json(path / MANIFEST, {"format": FORMAT, **manifest, **values})
    remember("".join(digests[file] for file in files) for files in networks.values())


def weights_of(part: str) -> tuple[str, str]:
    """The files in which the network of a part may keep weights."""
    return f"{part}.safetensors", WEIGHTS


def fingerprint_of(path: Path) -> str:
    """First 16 hex digits of the SHA-256 of a file's content; errors as for :func:`read_part`."""
    return digest_of(path)[:16]


def digest_of(path: Path) -> str:
    """The SHA-256 of a file's content; errors as for :func:`read_part`."""
    return hashlib.sha256(read_part(path)).hexdigest()


def joint_fingerprint(*fingerprints: str) -> str:
    """The joint fingerprint of several parts, in this order."""
    return hashlib.sha256("".join(fingerprints).encode()).hexdigest()[:16]


def read_part(path: Path, most: int = MAX_PART_BYTES) -> bytes:
    """The content of a bundle's file, which is untrusted: it may be a device or huge.

    BundleError if it cannot be read, is no regular file, or is larger than ``most`` bytes.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file")
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            # The stated size is not reliable: some files have none. Python allocates what is asked for.
            content = file.read(size + 1) if size <= most else b""
        if size > most or len(content) > size:
            raise OSError(errno.EFBIG, f"it is larger than {min(size, most)} bytes")
        return content
    except OSError as error:
        raise BundleError(f"{path} cannot be read: {error.strerror}; copy the whole folder again") from None
