"""The table of the records: it names every record of a sample's way, in the order of the stages."""

from __future__ import annotations

import re

from fuelrail.loaders import records


def test_the_table_names_the_records_in_the_order_of_the_module() -> None:
    rows = re.findall(r"^(\w+) +(\S.*?)  +`?(\w+)`?  +(\S.*)$", records.__doc__ or "", re.MULTILINE)[1:]
    assert [stage for stage, *_ in rows] == [
        "schedule", "prefetch", "slot", "fetch", "parse", "decode", "collate", "transfer",
    ]  # fmt: skip
    made = [makes for _, _, makes, _ in rows[:-2]]
    assert [takes.strip("`") for _, takes, _, _ in rows[1:-2]] == made[:-1]
    defined = [name for name, kind in vars(records).items() if isinstance(kind, type) and hasattr(kind, "_fields")]
    assert [name for name in defined if name in made] == made
    assert all(getattr(records, name).__doc__ for name in defined)
