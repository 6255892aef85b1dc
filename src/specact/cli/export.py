"""``specact export`` copies a bundle to where it will be deployed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from tyro.conf import Positional

from specact.cli.options import Maybe, Options
from specact.cli.output import print_result
from specact.errors import ConfigError
from specact.files import check_folder

if TYPE_CHECKING:
    from specact.bundle.bundle import Bundle
    from specact.bundle.manifest import Kind


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
        from specact.families.head import TRAINING

        source, out = self._source(), self.out
        kind = read_manifest(source).kind
        if kind not in ("pair", "flow", "regression", "tokens"):
            raise ConfigError(f"{source} is no policy, but {KINDS[kind]}; export the policy, or copy the folder")
        if self.device and kind not in LEFT_OUT:
            raise ConfigError(f"{source} is one policy, without a draft and a target to separate; leave out --device")
        if self.refresh and kind != "flow":
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
            loaded = _load(copy, kind)
            if self.refresh:
                from specact.families.chunks.flow import load_flow
                from specact.lab.train.freqcache import add_refresh

                add_refresh(load_flow(copy))
            copy.rename(out)
        summary = {"path": str(out), "fingerprint": loaded.fingerprint, "parity": loaded.manifest.parity}
        line = f"{out}: fingerprint {loaded.fingerprint}, parity {summary['parity']}"
        print_result(self.json, summary, [line])

    def _source(self) -> Path:
        """The bundle's folder."""
        from specact.bundle.bundle import find_bundle

        run, name = self.source, self.bundle
        is_name = len(run.parts) == 1 and not run.is_dir()
        if is_name or (run / "manifest.json").is_file():
            found = find_bundle(run)
            if name is not None:
                raise ConfigError(f"{found} is a bundle itself; leave out --bundle")
            return found
        made = {path.parent.name: path.parent for path in sorted((run / "bundles").glob("*/manifest.json"))}
        if not made:
            raise ConfigError(f"{run} holds no finished bundle; run specact train --out {run} to completion first")
        if name is None and len(made) > 1:
            raise ConfigError(f"{run} made several bundles ({', '.join(made)}); name one with --bundle")
        if name is not None and name not in made:
            raise ConfigError(f"{run} made no bundle {name!r}; it made {', '.join(made)}")
        return made[name or next(iter(made))]


def _load(path: Path, kind: Kind) -> Bundle[Any]:
    """The bundle, with everything in its folder checked."""
    from specact.families.chunks.flow import load_flow
    from specact.families.chunks.sources import load_regression
    from specact.families.codes.pair import load_codes
    from specact.families.tokens.policy import load_tokens
    from specact.systems.tokens import load_token_pair

    if kind == "pair":
        return load_codes(path)
    if kind == "flow":
        return load_flow(path)
    if kind == "regression":
        return load_regression(path)
    tokens = load_tokens(path)
    load_token_pair(tokens)  # loads the drafters
    return tokens
