"""``specact export`` copies a bundle to where it will be deployed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from tyro.conf import Positional

from specact.cli.options import Maybe, Options
from specact.cli.output import print_result
from specact.errors import ConfigError, unknown_name
from specact.files import check_folder

if TYPE_CHECKING:
    from specact.bundle.bundle import Bundle


@dataclass(frozen=True)
class Export(Options):
    """Copy a bundle, of a finished training run or any other, to a folder, and check that it loads."""

    source: Positional[Path]  # folder of a training run, or path or name of a bundle
    out: Path  # folder to create
    bundle: Maybe[str] = None  # name of the bundle, if the run made several
    device: bool = False  # leave out the target, or a token policy's decoder, which a robot with a server does not need
    refresh: bool = False  # add the network with which FreqCache computes a part of a flow policy's prefix again
    json: bool = False  # print path, fingerprints and parity as JSON

    def run(self) -> None:
        from specact.bundle.bundle import copy_bundle
        from specact.bundle.manifest import KINDS, LEFT_OUT, read_manifest
        from specact.families.chunks.flow import load_flow
        from specact.families.chunks.sources import load_regression
        from specact.families.codes.pair import load_codes
        from specact.families.tokens.policy import load_tokens
        from specact.gates.learned import TRAINING
        from specact.load import load_pair

        source, out = self._source(), self.out
        manifest = read_manifest(source)
        loaders: dict[str, Callable[[Path], Bundle[Any]]] = {
            "pair": load_codes, "flow": load_flow, "regression": load_regression, "tokens": load_tokens,
        }  # fmt: skip
        if manifest.kind not in loaders:
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
                from specact.lab.train.freqcache import add_refresh

                add_refresh(load_flow(copy))
            made = loaders[manifest.kind](copy)
            if manifest.kind == "tokens":
                load_pair(copy)  # checks the drafters
            copy.rename(out)
        summary = {"path": str(out), "fingerprint": made.fingerprint, "parity": manifest.parity}
        print_result(self.json, summary, [f"{out}: fingerprint {made.fingerprint}, parity {manifest.parity}"])

    def _source(self) -> Path:
        """The bundle's folder."""
        from specact.bundle.bundle import find_bundle

        run, name = self.source, self.bundle
        if (len(run.parts) == 1 and not run.is_dir()) or (run / "manifest.json").is_file():
            return find_bundle(run)
        made = {path.parent.name: path.parent for path in sorted((run / "bundles").glob("*/manifest.json"))}
        if not made:
            raise ConfigError(f"{run} holds no finished bundle; run specact train --out {run} to completion first")
        if name is None and len(made) > 1:
            raise ConfigError(f"{run} made several bundles ({', '.join(made)}); name one with --bundle")
        if name is not None and name not in made:
            raise unknown_name(f"bundle of {run}", name, made)
        return made[name or next(iter(made))]
