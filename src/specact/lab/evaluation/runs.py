"""Reads run folders of ``specact eval``, and groups runs of one pair of policies into studies."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from specact.errors import ConfigError, DataError
from specact.files import file_stem
from specact.lab.evaluation.run import read_table
from specact.lab.rollout.methods import METHODS
from specact.lab.rollout.steps import Table
from specact.records import read_json, read_record


def _shape(**fields: Any) -> Any:
    """The fields of an object in a run folder that a report needs; it may have more."""
    return msgspec.defstruct("Shape", fields.items())


_SETTINGS = _shape(bundle=str, env=str, fingerprint=str, episodes=int, seed=int, rate=float)
_MANIFEST = _shape(command=str, evaluation=_SETTINGS, timing=dict, machine=dict)
_METRICS = _shape(success=dict, score=dict, inferences=int, sent=float, latency=dict)
_SUMMARY = _shape(
    bundle=str, episodes=int, rate=float, link=str, realtime=bool, score=str, gates=dict, calibration=dict,
    contrasts=list[dict[str, Any]], methods=dict[str, _METRICS],  # type: ignore[valid-type]
)  # fmt: skip
# The settings in which the runs of a sweep may differ. The fingerprint identifies the bundle, whatever its path; errors
# on demonstrations are independent of the episodes; a head is named only where it is a method's draft.
_FREE_IN_SWEEP = {
    "rate", "methods", "episodes", "shard", "calibration_episodes", "bundle", "mse", "data", "demonstrations", "head",
}  # fmt: skip


@dataclass(frozen=True)
class Run:
    """One run folder, with its path as the user gave it; see :func:`~specact.lab.evaluation.run.evaluate`."""

    folder: Path
    manifest: dict[str, Any]
    summary: dict[str, Any]

    @property
    def evaluation(self) -> dict[str, Any]:
        """The run's settings, see :class:`~specact.lab.evaluation.run.Evaluation`."""
        return dict(self.manifest["evaluation"])

    @property
    def methods(self) -> dict[str, dict[str, Any]]:
        """The metrics of each method, in the order of ``METHODS``; unknown ones come last."""
        known = list(METHODS)
        methods = self.summary["methods"]
        order = sorted(methods, key=lambda name: known.index(name) if name in known else len(known))
        return {name: methods[name] for name in order}

    @property
    def of_codes(self) -> bool:
        """Whether it is of a pair of action codes: of others distances are measured."""
        return not any("distance" in metrics for metrics in self.methods.values())

    @property
    def binary(self) -> bool:
        """Whether the score is the success itself."""
        return all(m["score"]["mean"] == m["success"]["rate"] for m in self.methods.values())

    def outcomes(self, method: str) -> Table:
        """One row per episode; raises :exc:`DataError` if the table is missing or damaged."""
        return self._table("episodes", method)

    def steps(self, method: str) -> Table:
        """One row per inference, see :class:`~specact.lab.rollout.steps.Audit`; errors as of :meth:`outcomes`."""
        return self._table("steps", method)

    def _table(self, kind: str, method: str) -> Table:
        folder = self.folder / kind / file_stem(method)
        try:
            return read_table(folder)
        except (OSError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise DataError(
                f"{folder} holds no readable table ({reason}); run again: {self.manifest['command']}"
            ) from None


@dataclass(frozen=True)
class Skipped:
    """A folder or file that is not in the report, and the reason."""

    folder: Path
    reason: str


def find_runs(paths: Iterable[Path], skipped: Sequence[Skipped] = ()) -> tuple[list[Run], list[Skipped]]:
    """Every finished run at or below these folders, each once, in their order, and what was skipped here and before.

    Raises:
        ConfigError: if there is none; the message lists the skipped ones.
    """
    paths, skipped, runs, seen = list(paths), list(skipped), list[Run](), set[Path]()
    where = ", ".join(map(str, [*paths, *(skip.folder for skip in skipped)])) or "no folder"
    for path in paths:
        if not path.is_dir():
            skipped.append(Skipped(path, "there is no such folder or file"))
        for folder in sorted({file.parent for name in ("manifest", "summary") for file in path.rglob(f"{name}.json")}):
            if folder.resolve() not in seen:
                seen.add(folder.resolve())
                try:
                    run = _read(folder)
                    runs += [] if run is None else [run]
                except DataError as error:
                    skipped.append(Skipped(folder, str(error)))
    if not runs:
        reasons = "".join(f"; {skip.folder}: {skip.reason}" for skip in skipped)
        raise ConfigError(
            f"there is no finished run in {where}{reasons}. Make one with: specact eval ball --out runs/ball, "
            "then: specact report runs/ball --out report.html"
        )
    return runs, skipped


def _read(folder: Path) -> Run | None:
    """The run; None for another kind of folder, such as a bundle."""
    then = "run it again into a new folder"
    try:
        manifest = _json(folder / "manifest.json")
        if "evaluation" not in manifest:
            return None
        read_record(manifest, _MANIFEST, "manifest.json", DataError)
        then = f"run again: {manifest['command']}"
        summary = _json(folder / "summary.json")
        read_record(summary, _SUMMARY, "summary.json", DataError)
    except DataError as error:
        raise DataError(f"{error}; {then}") from None
    return Run(folder, manifest, summary)


def _json(path: Path) -> dict[str, Any]:
    try:
        # Until 0.2 the share that was sent was called transmission_rate.
        content = path.read_bytes().replace(b'"transmission_rate":', b'"sent":')
        return read_json(content, dict[str, Any], path.name, DataError)
    except FileNotFoundError:
        raise DataError(f"there is no {path.name}, the run is not finished") from None
    except OSError as error:
        raise DataError(f"{path.name} cannot be read ({error.strerror})") from None


@dataclass(frozen=True)
class Study:
    """All runs of one pair in one environment.

    The title is the pair's name, made unique where two have the same, the slug that as part of a file name. ``table``
    is the run with the most methods, then episodes, in virtual time where there is one; ``sweep`` are runs that differ
    only in rate, methods and episodes, by rate, at least one; ``realtime`` is the largest run over real sockets, and
    ``rejections`` of action codes the one with the most inferences of ADAHI.
    """

    title: str
    slug: str
    runs: tuple[Run, ...]
    table: Run
    sweep: tuple[Run, ...]
    realtime: Run | None
    rejections: Run | None

    @property
    def timed(self) -> Run:
        """The run whose times are reported: measured ones if available."""
        return self.realtime or self.table


def group(runs: Iterable[Run]) -> list[Study]:
    """Studies by pair and environment, in the order of their names."""
    parts: dict[tuple[str, str, str], list[Run]] = defaultdict(list)
    for run in runs:
        parts[run.summary["bundle"], run.evaluation["env"], run.evaluation["fingerprint"]].append(run)
    studies: list[Study] = []
    for (name, env, fingerprint), members in sorted(parts.items()):
        title = name
        if len({other_env for other, other_env, _ in parts if other == name}) > 1:
            title += f" in {env}"
        if sum((name, env) == other[:2] for other in parts) > 1:
            title += f" ({fingerprint})"
        studies.append(_study(title, members, {study.slug for study in studies}))
    return studies


def unused_slug(title: str, taken: Collection[str]) -> str:
    """A title as part of file names, unique among ``taken``."""
    slug = re.sub(r"[^A-Za-z0-9._]+", "-", title).strip("-.") or "bundle"
    while slug in taken:
        slug += "-"
    return slug


def _study(title: str, runs: list[Run], taken: set[str]) -> Study:
    realtime = [run for run in runs if run.summary["realtime"]]
    accounted = [run for run in runs if not run.summary["realtime"]]
    with_adahi = [run for run in runs if "adahi" in run.methods and run.of_codes]
    return Study(
        title=title,
        slug=unused_slug(title, taken),
        runs=tuple(runs),
        table=max(accounted or realtime, key=_size),
        sweep=_sweep(accounted or realtime),
        realtime=max(realtime, key=_size, default=None),
        rejections=max(with_adahi, key=lambda run: int(run.methods["adahi"]["inferences"]), default=None),
    )


def _size(run: Run) -> tuple[int, int]:
    return len(run.methods), int(run.summary["episodes"])


def _sweep(runs: list[Run]) -> tuple[Run, ...]:
    """Of the groups of runs that differ only in rate, the one with the most rates; then the most episodes."""
    groups: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        fixed = {key: value for key, value in run.evaluation.items() if key not in _FREE_IN_SWEEP}
        groups[json.dumps(fixed, sort_keys=True)].append(run)

    def size(members: list[Run]) -> tuple[int, int]:
        return len({run.summary["rate"] for run in members}), sum(run.summary["episodes"] for run in members)

    widest = max(groups.values(), key=size)
    return tuple(sorted(widest, key=lambda run: float(run.summary["rate"])))
