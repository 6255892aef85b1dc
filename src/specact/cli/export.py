"""``specact export`` copies a bundle to where it will be deployed."""

from __future__ import annotations

import json as plain
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import tyro

from specact.cli.output import print_json, results
from specact.errors import ConfigError
from specact.files import check_folder

if TYPE_CHECKING:
    from specact.runtime.manifest import BundleFolder, Kind


def export(
    run: tyro.conf.Positional[Path],
    /,
    out: Path,
    bundle: str | None = None,
    device: bool = False,
    refresh: bool = False,
    json: bool = False,
) -> None:
    """Copy a bundle, of a finished training run or any other, to a folder, and check that it loads.

    Args:
        run: folder of a training run, or path or name of a bundle.
        out: folder to create.
        bundle: name of the bundle, if the run made several.
        device: leave out the target, or a token policy's decoder, which a robot with a server does not need. The
            fingerprint stays the same, so that device and server still match.
        refresh: add the network with which FreqCache computes a part of a flow policy's prefix again.
        json: print path, fingerprints and parity as JSON.
    """
    from specact.families.head import TRAINING
    from specact.files import write_json
    from specact.runtime.manifest import KINDS, LEFT_OUT, kind_of

    source = _source(run, bundle)
    kind = kind_of(source)
    if kind not in ("pair", "flow", "regression", "tokens"):
        raise ConfigError(f"{source} is no policy, but {KINDS[kind]}; export the policy, or copy the folder")
    if device and kind not in LEFT_OUT:
        raise ConfigError(f"{source} is one policy, without a draft and a target to separate; leave out --device")
    if refresh and kind != "flow":
        raise ConfigError(f"{source} is no flow policy, and only one has a prefix to refresh; leave out --refresh")
    if out.exists():
        raise ConfigError(f"{out} exists already; choose another --out")
    check_folder(out)
    out.absolute().parent.mkdir(parents=True, exist_ok=True)
    # A head's unfinished training is of no use elsewhere.
    left_out = (TRAINING, f"{LEFT_OUT[kind]}.onnx") if device else (TRAINING,)
    # Renamed once it is complete and loads, so that a failure leaves nothing at --out.
    with TemporaryDirectory(prefix=f"{out.name}.", suffix=".partial", dir=out.absolute().parent) as folder:
        copy = Path(folder) / out.name
        shutil.copytree(source, copy, ignore=shutil.ignore_patterns(*left_out))
        if device:
            file = copy / "manifest.json"
            write_json(file, plain.loads(file.read_text()) | {"left_out": [LEFT_OUT[kind]]})
        loaded = _load(copy, kind)
        if refresh:
            from specact.families.chunks.bundle import load_flow
            from specact.lab.train.freqcache import add_refresh

            add_refresh(load_flow(copy))
        copy.rename(out)
    summary = {"path": str(out), "fingerprint": loaded.fingerprint, "parity": loaded.manifest["parity"]}
    if json:
        print_json(summary)
    else:
        results.print(f"{out}: fingerprint {loaded.fingerprint}, parity {summary['parity']}", highlight=False)


def _load(path: Path, kind: Kind) -> BundleFolder:
    """The bundle, with everything in its folder checked."""
    from specact.families.chunks.bundle import load_flow, load_regression
    from specact.families.codes.bundle import load_bundle
    from specact.families.tokens.bundle import load_tokens
    from specact.families.tokens.pair import token_pair

    match kind:
        case "pair":
            return load_bundle(path)
        case "flow":
            return load_flow(path)
        case "regression":
            return load_regression(path)
        case "tokens":
            tokens = load_tokens(path)
            token_pair(tokens)  # loads the drafters
            return tokens
        case _:
            raise AssertionError(f"{kind} is not exported")


def _source(run: Path, bundle: str | None) -> Path:
    """The bundle's folder."""
    from specact.families.codes.bundle import find_bundle

    a_name = len(run.parts) == 1 and not run.is_dir()
    if a_name or (run / "manifest.json").is_file():
        found = find_bundle(run)
        if bundle is not None:
            raise ConfigError(f"{found} is a bundle itself; leave out --bundle")
        return found
    made = {path.parent.name: path.parent for path in sorted((run / "bundles").glob("*/manifest.json"))}
    if not made:
        raise ConfigError(f"{run} holds no finished bundle; run specact train --out {run} to completion first")
    if bundle is None and len(made) > 1:
        raise ConfigError(f"{run} made several bundles ({', '.join(made)}); name one with --bundle")
    name = bundle or next(iter(made))
    if name not in made:
        raise ConfigError(f"{run} made no bundle {name!r}; it made {', '.join(made)}")
    return made[name]
