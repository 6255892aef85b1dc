"""``specact reproduce`` runs a paper's study on our pairs and writes its page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import tyro

from specact.cli.output import command_line, progress_bars, remarks, results
from specact.cli.report import report
from specact.cli.unused import refuse_unused
from specact.errors import ConfigError

if TYPE_CHECKING:
    from specact.lab.rollout.pool import Pool


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
    tokens: Spec-VLA, KERV and HeiSD with their controls, on the token policies; then tables and pictures, tokens.md.
    flow: FLASH with its controls, on the flow policies; then tables and pictures, flow.md.
    split: RoboECC, a target in stages on device and server over recorded links (--data, the folder with mahimahi/ and
    telerobot_rtt/); then tables, split.md.
    cache: FreqCache with its controls, on the flow policy that sees two cameras in patches; then tables, cache.md.

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

    why = f"does not apply to the study {paper}; leave it out"
    if paper != "adahi":
        refuse_unused({"no_films": not films, "data": data is not None and paper != "split"}, why)
    if paper == "split":
        refuse_unused({"pairs": pairs is not None, "workers": workers is not None, "on": on != "here"}, why)
        _split(out, data, quick, seed)
        return
    if paper != "adahi":
        with Pool(workers, on) as pool:
            _side_by_side(paper, out, None if pairs is None else pairs.split(","), quick, seed, pool)
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


def _side_by_side(paper: str, out: Path, wanted: list[str] | None, quick: bool, seed: int, pool: Pool) -> None:
    """Runs a study of the decodings of token or flow policies, and writes a table and a picture of each policy."""
    import json

    from specact.files import write_whole
    from specact.lab.evaluation import cache_study, flow_study, token_study
    from specact.lab.evaluation.run import evaluate, finished
    from specact.lab.report import cache, flow, tokens
    from specact.lab.report.drawing import style

    studies: dict[str, tuple[Callable[..., Sequence[Any]], str, Callable[..., Any], Any, Callable[..., Any]]] = {
        "flow": (flow_study.plan_flow, "rounds", flow_study.write_rounds, flow, flow.draw_flow),
        "tokens": (
            token_study.plan_tokens,
            "gain",
            token_study.write_gain,
            tokens,
            lambda summary, _: tokens.draw_tokens(summary),
        ),
        "cache": (cache_study.plan_cache, "reuse", cache_study.write_reuse, cache, cache.draw_cache),
    }
    plan, file, measure, pages, draw = studies[paper]
    chapters = plan(seed=seed, quick=quick)
    names = [chapter.folder for chapter in chapters]
    unknown = [name for name in wanted or () if name not in names]
    if unknown:
        raise ConfigError(f"the study of {paper} has no {', '.join(unknown)}; choose among {', '.join(names)}")
    page = [pages.methods_table() + "\n"]
    for chapter in chapters:
        if wanted is not None and chapter.folder not in wanted:
            continue
        folder = out / chapter.folder
        with progress_bars() as update:
            if not finished(chapter.evaluation, folder):
                evaluate(chapter.evaluation, folder, update, pool, command=command_line())
            if not (folder / f"{file}.json").exists():
                measure(chapter, folder / f"{file}.json", update)
        summary, beside = (json.loads((folder / f"{name}.json").read_text()) for name in ("summary", file))
        page += pages.report_markdown(summary, beside)
        with style():
            figure = draw(summary, beside)
            figure.savefig(folder / f"{paper}.png", dpi=120)
        page.append(f"![success over cost]({chapter.folder}/{paper}.png)\n")
    write_whole(out / f"{paper}.md", "\n".join(page).encode())
    results.print(f"study: {out}, tables: {out / f'{paper}.md'}", highlight=False)


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
