"""Reads run folders of ``specact eval``, and groups runs of one pair of policies into studies."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specact.errors import ConfigError, DataError
from specact.files import file_stem
from specact.lab.evaluation.metrics import Table
from specact.lab.evaluation.run import read_table
from specact.lab.rollout.methods import METHODS

_OF_MANIFEST = ("command", "specact", "evaluation", "timing", "machine", "order")
_OF_EVALUATION = (
    "bundle", "env", "fingerprint", "episodes", "seed", "rate", "link", "offset", "methods",
)  # fmt: skip
_OF_SUMMARY = ("bundle", "episodes", "rate", "link", "realtime", "score", "methods", "contrasts", "calibration")
_OF_CALIBRATION = {"settings", "held_out"}
_OF_ANY_METHOD = ("success", "score", "transmission_rate")
_OF_METHOD = (
    "success", "score", "inferences", "transmission_rate", "true_skip_ratio", "acceptance", "gated_loss",
    "gate_efficiency", "choice_efficiency", "action_change_loss", "latency",
)  # fmt: skip
# The settings in which the runs of a sweep may differ. The fingerprint identifies the bundle, whatever its path; errors
# on demonstrations are independent of the episodes; a head is named only where it is a method's draft.
_FREE_IN_SWEEP = (
    "rate", "methods", "episodes", "shard", "calibration_episodes", "bundle", "mse", "data", "demonstrations",
    "head",
)  # fmt: skip


@dataclass(frozen=True)
class Run:
    """One run folder.

    Attributes:
        folder: its path, as the user gave it.
        manifest, summary: see :func:`~specact.lab.evaluation.run.evaluate`.
    """

    folder: Path
    manifest: dict[str, Any]
    summary: dict[str, Any]

    @property
    def evaluation(self) -> dict[str, Any]:
        """Its settings, see :class:`~specact.lab.evaluation.evaluation.Evaluation`."""
        return dict(self.manifest["evaluation"])

    @property
    def methods(self) -> dict[str, dict[str, Any]]:
        """The metrics of each method, in the order of ``METHODS``; unknown ones come last."""
        known = list(METHODS)
        place = {name: known.index(name) if name in known else len(known) for name in self.summary["methods"]}
        return {name: self.summary["methods"][name] for name in sorted(place, key=lambda name: place[name])}

    @property
    def of_codes(self) -> bool:
        """Whether it is of a pair of action codes."""
        return all(map(_has_codes, self.summary["methods"].values()))

    @property
    def binary(self) -> bool:
        """Whether the score is the success itself."""
        return all(m["score"]["mean"] == m["success"]["rate"] for m in self.summary["methods"].values())

    @property
    def calibrations(self) -> dict[str, Any]:
        """The calibrations of its gates by file name, without the fits; unreadable ones are left out."""
        calibrations = {path.stem: _read_json(path) for path in sorted((self.folder / "calibration").glob("*.json"))}
        whole = {
            name: calibration
            for name, calibration in calibrations.items()
            if isinstance(calibration, dict) and calibration.keys() >= _OF_CALIBRATION
        }
        return {name: {**calibration, "model": "left out"} for name, calibration in whole.items()}

    def as_json(self) -> str:
        """Its manifest and calibrations."""
        return json.dumps({**self.manifest, "calibration": self.calibrations}, indent=2)

    def outcomes(self, method: str) -> Table:
        """One row per episode.

        Raises:
            DataError: if the table is missing or damaged.
        """
        return self._table("episodes", method)

    def steps(self, method: str) -> Table:
        """One row per inference, see :class:`~specact.lab.rollout.steps.Audit`.

        Raises:
            DataError: if the table is missing or damaged.
        """
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
    """A folder that is not in the report, and the reason."""

    folder: Path
    reason: str


def find_runs(
    paths: Iterable[Path], skipped: Sequence[Skipped] = (), *, of_codes: bool = False
) -> tuple[list[Run], list[Skipped]]:
    """Every finished run at or below these folders, each once, in the order of their paths.

    Args:
        paths: the folders.
        skipped: previously skipped ones.
        of_codes: whether runs of policies other than pairs of action codes are skipped.

    Raises:
        ConfigError: if there is none; the message lists the skipped ones.
    """
    runs: list[Run] = []
    paths, skipped = list(paths), list(skipped)
    where = ", ".join(map(str, [*paths, *(one.folder for one in skipped)])) or "no folder"
    for folder in _candidates(paths, skipped):
        result = _read(folder)
        if isinstance(result, Run) and of_codes and not result.of_codes:
            result = Skipped(
                folder, "it is of a policy that answers with chunks or tokens, and this page is about action codes; "
                "its tables are in summary.json, and experiments/ draws such policies"
            )  # fmt: skip
        if isinstance(result, Run):
            runs.append(result)
        elif result is not None:
            skipped.append(result)
    if not runs:
        reasons = "".join(f"; {one.folder}: {one.reason}" for one in skipped)
        raise ConfigError(
            f"there is no finished run in {where}{reasons}. Make one with: specact eval ball --out runs/ball, "
            "then: specact report runs/ball --out report.html"
        )
    return runs, skipped


def _candidates(paths: Iterable[Path], skipped: list[Skipped]) -> Iterator[Path]:
    seen = set()
    for path in paths:
        if not path.is_dir():
            skipped.append(Skipped(path, "there is no such folder or file"))
            continue
        for folder in sorted({file.parent for name in ("manifest", "summary") for file in path.rglob(f"{name}.json")}):
            if folder.resolve() not in seen:
                seen.add(folder.resolve())
                yield folder


def _read(folder: Path) -> Run | Skipped | None:
    """The run; None for another kind of folder, such as a bundle."""
    manifest, summary = (_read_json(folder / name) for name in ("manifest.json", "summary.json"))
    if isinstance(manifest, dict) and "evaluation" not in manifest:
        return None
    if manifest is None:
        return Skipped(folder, "it has no manifest.json, so nobody knows what was run; run it again into a new folder")
    if isinstance(manifest, str):
        return Skipped(folder, f"manifest.json is damaged ({manifest}); run it again into a new folder")
    error = _missing_keys("manifest.json", manifest, _OF_MANIFEST) or _missing_keys(
        "manifest.json", manifest["evaluation"], _OF_EVALUATION
    )
    if error is not None:
        return Skipped(folder, error)
    rerun = f"run again: {manifest['command']}"
    if summary is None:
        return Skipped(folder, f"it is not finished, it has no summary.json; {rerun}")
    if isinstance(summary, str):
        return Skipped(folder, f"summary.json is damaged ({summary}); {rerun}")
    error = _missing_keys("summary.json", summary, _OF_SUMMARY) or _missing_keys("summary.json", summary["methods"], ())
    if error is None:
        for metrics in summary["methods"].values():
            needed = _OF_METHOD if _has_codes(metrics) else _OF_ANY_METHOD
            error = error or _missing_keys("summary.json", metrics, needed)
        for row in summary["contrasts"]:
            error = error or _missing_keys("summary.json", row.get("success"), ("p_holm",))
    if error is not None:
        return Skipped(folder, f"{error}; {rerun}")
    return Run(folder, manifest, summary)


def _has_codes(metrics: Any) -> bool:
    """Whether a method's metrics are of a pair of action codes: of others distances are measured."""
    return not (isinstance(metrics, dict) and "distance" in metrics)


def _read_json(path: Path) -> dict[str, Any] | str | None:
    """The file's object; None if there is no file; the error as a string if it is damaged."""
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        return str(error)
    return value if isinstance(value, dict) else "it holds no JSON object"


def _missing_keys(file: str, value: Any, names: Iterable[str]) -> str | None:
    if not isinstance(value, dict):
        return f"{file} is damaged: an object is missing in it"
    missing = [name for name in names if name not in value]
    return f"{file} lacks {', '.join(missing)}: another version of specact wrote it" if missing else None


@dataclass(frozen=True)
class Study:
    """All runs of one bundle in one environment.

    Attributes:
        title: the bundle's name, made unique where two bundles have the same.
        slug: the title as part of a file name.
        runs: all of them.
        table: the run with the most methods, then episodes; in virtual time where there is one.
        sweep: runs that differ only in rate, methods and episodes, by rate; at least one.
        realtime: the largest run over real sockets, or None.
        rejections: the run with the most inferences of ADAHI, or None.
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

    def use(self, run: Run) -> str:
        """The parts of the report that use a run."""
        uses = {
            "table": run is self.table,
            "times": run is self.timed,
            "rejections": run is self.rejections,
            "rates": len(self.sweep) > 1 and any(run is one for one in self.sweep),
        }
        return ", ".join(use for use, true in uses.items() if true) or "not shown, another run has more"


def group(runs: Iterable[Run]) -> list[Study]:
    """Studies by bundle and environment, in the order of their names."""
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
    return Study(
        title=title,
        slug=unused_slug(title, taken),
        runs=tuple(runs),
        table=max(accounted or realtime, key=_size),
        sweep=_sweep(accounted or realtime),
        realtime=max(realtime, key=_size, default=None),
        rejections=max((run for run in runs if "adahi" in run.methods), key=_inferences, default=None),
    )


def _size(run: Run) -> tuple[int, int]:
    return len(run.methods), int(run.summary["episodes"])


def _inferences(run: Run) -> int:
    return int(run.methods["adahi"]["inferences"])


def _sweep(runs: list[Run]) -> tuple[Run, ...]:
    """Of the groups of runs that differ only in rate, the one with the most rates; then the most episodes."""
    groups: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        fixed: dict[str, Any] = {key: value for key, value in run.evaluation.items() if key not in _FREE_IN_SWEEP}
        groups[json.dumps(fixed, sort_keys=True)].append(run)

    def size(members: list[Run]) -> tuple[int, int]:
        return len({run.summary["rate"] for run in members}), sum(run.summary["episodes"] for run in members)

    widest = max(groups.values(), key=size)
    return tuple(sorted(widest, key=lambda run: float(run.summary["rate"])))
