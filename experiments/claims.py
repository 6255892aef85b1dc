"""The claims of the papers, each with one verdict, which nobody types: it follows from the facts of a report.

``claims.toml`` beside a ``report.md`` has a table for each claim that the report tests, with the names of its facts::

    [[claim]]
    paper = "A paper"
    claim = "It takes half the time at no loss of success (table 1)"
    number = "{ball[time][method]:ci2} of the target's time on ball"
    conditions = { "on ball" = ["ball[time][method] < 1", "ball_method_target not worse"] }

A claim holds in a place if all conditions of the place are met, by the whole interval and after correction: ``FACT <
NUMBER``, ``FACT > NUMBER``, and of contrasts ``better``, ``worse`` and ``not worse``. A claim that cannot be tested has
``untestable``, with the reason, in place of the two last lines.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from string import Formatter
from typing import Any

from experiments.report import Metrics, Table, ends, filled, verdict

VERDICTS = ("fails", "holds only", "holds", "not testable here")  # how they begin, and their order
_CONDITION = re.compile(r"(.+?) (?:(better|worse|not worse)|([<>]) (-?[\d.]+))")


def claims_table(facts: Mapping[str, Metrics]) -> str:
    """The claims of all papers; of each paper first those that fail.

    Args:
        facts: of every report, by its name.
    """
    rows = [{**claim, "report": name, **judged(claim, facts[name])} for name in facts for claim in stored_claims(name)]
    papers = list(dict.fromkeys(row["paper"] for row in rows))
    rows.sort(key=lambda row: (papers.index(row["paper"]), VERDICTS.index(row["kind"])))
    cells = "{paper} | {claim} | **{verdict}** | {number} | [{report}]({report}.md)"
    return Table("", "", "paper | claim | verdict | number | report", cells, rows).grid()


def stored_claims(name: str) -> list[dict[str, Any]]:
    """The claims that a report tests."""
    file = Path(__file__).with_name(name) / "claims.toml"
    return list(tomllib.loads(file.read_text())["claim"]) if file.exists() else []


def judged(claim: Mapping[str, Any], facts: Metrics) -> dict[str, str]:
    """The ``verdict`` of a claim, its ``kind``, and its ``number`` or why there is none.

    Raises:
        ValueError: for a condition that cannot be read.
        KeyError: for a fact that there is none of.
    """
    if "untestable" in claim:
        return {"verdict": VERDICTS[3], "kind": VERDICTS[3], "number": claim["untestable"]}
    places: Mapping[str, list[str]] = claim["conditions"]
    met = [place for place, conditions in places.items() if not [c for c in conditions if not _met(c, facts)]]
    kind = VERDICTS[2 if len(met) == len(places) else 1 if met else 0]
    only = f" {' and '.join(filter(None, (', '.join(met[:-1]), met[-1])))}" if kind == "holds only" else ""
    return {"verdict": f"{kind}{only}", "kind": kind, "number": filled(claim["number"], facts)}


def _met(condition: str, facts: Metrics) -> bool:
    if not (parts := _CONDITION.fullmatch(condition)):
        raise ValueError(
            f"{condition!r} is no condition; give FACT, then better, worse, not worse, < NUMBER or > NUMBER"
        )
    name, test, relation, bound = parts.groups()
    fact = Formatter().get_field(name, (), facts)[0]
    if test:
        said = verdict(fact)
        return said != "worse than" if test == "not worse" else said == f"{test} than"
    low, high = ends(fact) if isinstance(fact, Mapping) else (fact, fact)
    return bool(high < float(bound) if relation == "<" else low > float(bound))
