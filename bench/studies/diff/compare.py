"""A comparison of two reports: from files to what became worse."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import msgspec

from fuelrail.bench.report.files import REPORT_JSON
from fuelrail.bench.studies.diff.changes import Change, Comparable, compare, differences, refuse_other_data
from fuelrail.bench.studies.diff.kinds import load_comparable
from fuelrail.pipeline.settings import CheckedSettings, flag, make_options


class DiffOptions(CheckedSettings, frozen=True, kw_only=True):
    """Options of `fuelrail.diff`, and the flags of ``fuelrail bench diff``."""

    threshold: Annotated[float, msgspec.Meta(ge=0, lt=1), flag("tolerated slowdown (0.02 = 2 %)")] = 0.02
    other_dataset: Annotated[bool, flag("compare reports of different datasets or splits; refused otherwise")] = False


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Two reports compared.

    ``worse``: names of the figures that are worse beyond noise and threshold. ``differences``: what else differs, such
    as the machine or an option, one line each.
    """

    changes: list[Change]
    worse: list[str]
    differences: list[str]


def diff(
    before: Comparable | str | os.PathLike[str],
    after: Comparable | str | os.PathLike[str],
    options: DiffOptions | None = None,
    **changes: Any,  # noqa: ANN401 - fields of DiffOptions
) -> Comparison:
    """Compare two reports of one kind, given as reports, files or folders.

    ``fuelrail.diff("A", "B", threshold=0.05)`` takes the fields of :class:`DiffOptions` as keywords. Raises ConfigError
    for reports that cannot be compared.
    """
    options = make_options(DiffOptions, options, changes)
    old, new = _load(before), _load(after)
    if not options.other_dataset:
        refuse_other_data(old, new)
    found = compare(old, new)
    worse = [change.name for change in found if change.is_worse(options.threshold)]
    return Comparison(changes=found, worse=worse, differences=differences(old, new))


def _load(report: Comparable | str | os.PathLike[str]) -> Comparable:
    if isinstance(report, msgspec.Struct):
        return report
    path = Path(report)
    return load_comparable(path / REPORT_JSON if path.is_dir() else path)
