"""``specact reproduce`` runs a paper's study on our pairs and writes its page."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import tyro

from specact.cli.output import command_line, progress_bars, remarks, results
from specact.cli.report import report
from specact.cli.unused import refuse_unused
from specact.errors import ConfigError

_MOVED = {
    name: f"python -m experiments {experiment} run --out OUT"
    for name, experiment in (("tokens", "tokens"), ("flow", "flash"), ("cache", "freqcache"))
}


def reproduce(
    paper: tyro.conf.Positional[Literal["adahi", "tokens", "flow", "split", "cache"]],
    /,
    out: Path,
    pairs: str | None = None,
    quick: bool = False,
    data: Path | None = None,
    seed: int = 1,
    films: bool = True,
    workers: int | None = None,
    on: str = "here",
) -> None:
    """Run a study; an interrupted one resumes.

    adahi: tables, sweeps over the transmission rate, rejection over deviation, real time; then a page, report.html.
    split: RoboECC, a target in stages on device and server over recorded links (--data, the folder with mahimahi/ and
    telerobot_rtt/); then tables, split.md.

    Args:
        paper: the study to run.
        out: folder of the study: one run folder per part, and the page.
        pairs: comma-separated bundles; all bundles of the study if not given. Not of split, whose bundle is fixed.
        quick: run a few episodes of each part, to check that everything works. The results are not meaningful.
        data: of adahi, folder with the demonstrations, for errors along them; see the recipes. Of split, folder with
            the recorded links.
        seed: random seed. Seed 0 was used to choose the settings of the bundles.
        films: of adahi: add films of rollouts to the page.
        workers: processes; one per core if not given.
        on: where they run: here, ray for a Ray cluster that is started here, or ray:ADDRESS; see docs/scale.md.
    """
    from specact.lab.evaluation.run import evaluate, finished
    from specact.lab.evaluation.study import PAIRS, plan
    from specact.lab.rollout.pool import Pool

    if paper in _MOVED:
        raise ConfigError(f"this study is no part of the package; in a checkout: {_MOVED[paper]}")
    why = f"does not apply to the study {paper}; leave it out"
    if paper != "adahi":
        refuse_unused({"no_films": not films, "data": data is not None and paper != "split"}, why)
    if paper == "split":
        refuse_unused({"pairs": pairs is not None, "workers": workers is not None, "on": on != "here"}, why)
        _split(out, data, quick, seed)
        return
    wanted = PAIRS if pairs is None else tuple(name.strip() for name in pairs.split(","))
    if not all(wanted):
        raise ConfigError(f"--pairs must be bundle names separated by commas, got {pairs!r}")
    chapters = plan(wanted, seed=seed, quick=quick, data=data)
    left = [chapter for chapter in chapters if not finished(chapter.evaluation, out / chapter.folder)]
    remarks.print(f"{paper}: {len(chapters)} runs, {len(chapters) - len(left)} of them done", highlight=False)
    with Pool(workers, on) as pool:
        for number, chapter in enumerate(left):
            remarks.print(f"{chapter.folder}, {len(left) - number} left", highlight=False)
            with progress_bars() as update:
                summary = evaluate(chapter.evaluation, out / chapter.folder, update, pool, command=command_line())
            remarks.print(f"  {summary['seconds']:.0f} s", highlight=False)
    if data is None:
        remarks.print("without --data there are no errors along recorded demonstrations", style="yellow")
    report((out,), out / "report.html", films=films)
    results.print(f"study: {out}", highlight=False)


def _split(out: Path, data: Path | None, quick: bool, seed: int) -> None:
    from specact.files import write_json, write_whole
    from specact.lab.evaluation.split_links import bandwidths_of, study_links
    from specact.lab.evaluation.split_study import BUNDLE, FACTORS, SplitStudy
    from specact.lab.report.split import report_markdown
    from specact.lab.train.forecast import train_forecast
    from specact.lab.train.split import split_bundle

    if data is None:
        raise ConfigError("the study of split targets replays recorded links; give --data, their folder")
    folder = out / "stages"
    if not (folder / "manifest.json").exists():
        split_bundle(BUNDLE, folder)
    links = study_links(data, out)
    if quick:
        links = links[:1]
    study = SplitStudy(folder, out, tuple(links), FACTORS[:1] if quick else FACTORS, 15 if quick else 60, seed)
    for link in links:
        if not (file := out / f"forecast-{link.name}.onnx").exists():
            train_forecast(bandwidths_of(link, study.staged)[0], file)
    with progress_bars() as update:
        study.run(update)
    found = study.results()
    write_json(out / "split.json", {"command": command_line(), **found})
    write_whole(out / "split.md", "\n".join(report_markdown(found)).encode())
    results.print(f"study: {out}, tables: {out / 'split.md'}", highlight=False)
