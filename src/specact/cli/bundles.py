"""``specact pair``, ``split`` and ``export`` make folders of policies; ``specact bundle`` checks those of others."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from tyro.conf import Positional

from specact.cli.options import Flat, Options
from specact.cli.output import lines_of, print_error, print_result
from specact.errors import ConfigError, SpecactError
from specact.families.chunks.pair import PairSettings
from specact.files import check_folder
from specact.load import load_pair, load_policy, make_pair


@dataclass(frozen=True, kw_only=True)
class Pair(Options):
    """Make a pair of two chunk policies: a folder that run, serve, calibrate and eval take.

    A policy is a bundle, BUNDLE#draft or BUNDLE#target of a pair of action codes, a .toml file that describes an ONNX
    file, lerobot:PATH@HZ for what LeRobot saved, openpi:ws://HOST:PORT#FILE.toml for a policy on an openpi server, or
    MODULE:NAME. The last four are named again, with --draft or --target, whenever the pair is used.
    """

    draft: str  # the small policy, on the robot
    target: str  # the large policy
    out: Path  # folder to create
    settings: Flat[PairSettings] = field(default_factory=PairSettings)
    json: bool = False  # print the result as JSON

    def run(self) -> None:
        pair = make_pair(self.out, self.draft, self.target, self.settings)
        print_result(self.json, {"name": pair.name, "fingerprint": pair.fingerprint, "execute": pair.execute})


@dataclass(frozen=True)
class Split(Options):
    """Cut a target into stages, at every tensor through which all that follows passes.

    The folder goes to both sides: specact serve FOLDER runs the first stages of each request, specact run --split
    FOLDER the others. With float32 activations any cut gives the answer of none, exactly.
    """

    # pair of action codes or policy by regression, whose target is cut, flow policy, whose prefix is, or token policy,
    # which is cut behind its encoder and its prefill
    bundle: Positional[str]
    out: Path  # folder to create
    json: bool = False  # print the stages as JSON

    def run(self) -> None:
        from specact.bundle.bundle import find_bundle
        from specact.bundle.manifest import read_manifest
        from specact.lab.train.split import split_bundle, split_tokens

        split = split_tokens if read_manifest(find_bundle(self.bundle)).kind == "tokens" else split_bundle
        spec = split(self.bundle, self.out).spec
        activations = [list(shape) for shape in spec.activations]
        result = {"path": str(self.out), "network": spec.network, "stages": spec.stages, "activations": activations}
        print_result(self.json, result)


@dataclass(frozen=True)
class Export(Options):
    """Copy a bundle, of a finished training run or any other, to a folder, and check that it loads."""

    source: Positional[Path]  # folder of a training run, or path or name of a bundle
    out: Path  # folder to create
    device: bool = False  # leave out the target, or a token policy's decoder, which a robot with a server does not need
    refresh: bool = False  # add the network with which FreqCache computes a part of a flow policy's prefix again
    json: bool = False  # print path, fingerprints and parity as JSON

    def run(self) -> None:
        from specact.bundle.bundle import copy_bundle
        from specact.bundle.manifest import KINDS, LEFT_OUT, read_manifest
        from specact.gates.learned import TRAINING

        source, out = self._source(), self.out
        manifest = read_manifest(source)
        if manifest.kind not in ("pair", "flow", "regression", "tokens"):
            raise ConfigError(f"{source} is no policy, but {KINDS[manifest.kind]}; copy the folder")
        if self.device and manifest.kind not in LEFT_OUT:
            raise ConfigError(f"{source} is one policy, without a draft and a target to separate; leave out --device")
        if self.refresh and manifest.kind != "flow":
            raise ConfigError(f"{source} is no flow policy, and only one has a prefix to refresh; leave out --refresh")
        if out.exists():
            raise ConfigError(f"{out} exists already; choose another --out")
        check_folder(out)
        out.absolute().parent.mkdir(parents=True, exist_ok=True)
        # Renamed once it is complete and loads, so that a failure leaves nothing at --out.
        with TemporaryDirectory(prefix=f"{out.name}.", suffix=".partial", dir=out.absolute().parent) as folder:
            copy = Path(folder) / out.name
            # A head's unfinished training is of no use elsewhere.
            copy_bundle(source, copy, device=self.device, ignore=[TRAINING])
            if self.refresh:
                from specact.families.chunks.flow import load_flow
                from specact.lab.train.freqcache import add_refresh

                add_refresh(load_flow(copy))
            bundle = load_pair(copy) if manifest.kind in ("pair", "tokens") else load_policy(str(copy))
            copy.rename(out)
        print_result(self.json, {"path": str(out), "fingerprint": bundle.fingerprint, "parity": manifest.parity})

    def _source(self) -> Path:
        """The bundle's folder."""
        from specact.bundle.bundle import find_bundle

        run = self.source
        if (len(run.parts) == 1 and not run.is_dir()) or (run / "manifest.json").is_file():
            return find_bundle(run)
        bundles = [path.parent for path in sorted((run / "bundles").glob("*/manifest.json"))]
        if not bundles:
            raise ConfigError(f"{run} holds no finished bundle; run specact train --out {run} to completion first")
        if len(bundles) > 1:
            raise ConfigError(f"{run} made several bundles; name one of {', '.join(map(str, bundles))}")
        return bundles[0]


@dataclass(frozen=True)
class Bundle(Options):
    """Check bundles of unknown origin, specact bundle check PATH...: networks run in a process with limited memory.

    Every command does so where a network is new; this does it again, and says what there is. The exit status is 1 if
    a bundle is refused.
    """

    task: Positional[Literal["check"]]
    paths: Positional[tuple[str, ...]] = (".",)  # folders or names of bundles; those in folders below are checked, too
    json: bool = False  # print what was checked as JSON

    def run(self) -> None:
        from specact.bundle.bundle import check_bundle, find_bundle
        from specact.bundle.manifest import MANIFEST

        checked, refused = [], False
        for folder in (file.parent for name in self.paths for file in sorted(find_bundle(name).rglob(MANIFEST))):
            try:
                checked.append(check_bundle(folder))
            except SpecactError as error:
                print_error(str(error))
                refused = True
        print_result(self.json, checked, (line for report in checked for line in ("", *_lines(report))))
        if refused:
            raise SystemExit(1)


def _lines(report: dict[str, Any]) -> list[str]:
    networks = {
        name: f"{network['inputs']} -> {network['outputs']}, {network['memory_mib']} MiB, {network['seconds']:.2g} s"
        for name, network in report["networks"].items()
    }
    return lines_of({**report, "networks": None, **networks})
