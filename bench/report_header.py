"""What every report of the harness says first, whatever its kind."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import msgspec

from fuelrail.bench.dataset_facts import DatasetFacts  # noqa: TC001 (msgspec resolves the field's type)
from fuelrail.bench.machine import MachineFacts  # noqa: TC001 (likewise)


class ReportHeader(msgspec.Struct, frozen=True, kw_only=True):
    """The beginning of a report.

    ``schema`` and ``version`` say its kind (:mod:`fuelrail.bench.reports`). ``cut_off`` says why it is partial,
    ``warnings`` what its figures must be doubted for.
    """

    schema: str
    version: int
    created: str
    cut_off: str | None
    machine: MachineFacts
    dataset: DatasetFacts
    options: dict[str, Any]
    warnings: list[str]


def created_now() -> str:
    """The field ``created``: UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")
