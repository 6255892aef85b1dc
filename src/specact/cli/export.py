"""``specact export`` copies a finished run's bundle to where it will be deployed."""

from __future__ import annotations

import shutil
from pathlib import Path

import tyro

from specact.cli.output import print_json, results
from specact.errors import ConfigError


def export(run: tyro.conf.Positional[Path], /, out: Path, bundle: str | None = None, json: bool = False) -> None:
    """Copy a bundle of a finished training run to a folder, and check that it loads.

    Args:
        run: folder of a training run.
        out: folder to create.
        bundle: name of the bundle, if the run made several.
        json: print path, fingerprints and parity as JSON.
    """
    from specact.policies.bundle import load_bundle
    from specact.policies.flow_bundle import load_flow
    from specact.policies.manifest import kind_of

    made = {path.parent.name: path.parent for path in sorted((run / "bundles").glob("*/manifest.json"))}
    if not made:
        raise ConfigError(f"{run} holds no finished bundle; run specact train --out {run} to its end first")
    if bundle is None and len(made) > 1:
        raise ConfigError(f"{run} made several bundles ({', '.join(made)}); name one with --bundle")
    name = bundle or next(iter(made))
    if name not in made:
        raise ConfigError(f"{run} made no bundle {name!r}; it made {', '.join(made)}")
    if out.exists():
        raise ConfigError(f"{out} exists already; choose another --out")
    shutil.copytree(made[name], out)
    loaded = load_flow(out) if kind_of(out) == "flow" else load_bundle(out)
    facts = {"path": str(out), "fingerprint": loaded.fingerprint, "parity": loaded.manifest["parity"]}
    if json:
        print_json(facts)
    else:
        results.print(f"{out}: fingerprint {loaded.fingerprint}, parity {facts['parity']}", highlight=False)
