"""Limits of what a reader holds: of sizes when they are decoded, not of sizes as they are stored.

A few stored bytes may decode to many: a dictionary, a bitmap, an alias. So each reader computes
what it is about to hold, and compares that with the one limit of its kind. The site shows
:data:`LIMITS` as a table.
"""

from __future__ import annotations

from typing import Final, NamedTuple

_MIB: Final = 1 << 20


class Limit(NamedTuple):
    """A limit and what it is of.

    Attributes:
        subject: what is limited, as the table of the site has it.
        maximum: the largest number that is allowed.
        unit: what is counted.
    """

    subject: str
    maximum: int
    unit: str = "bytes"

    def broken(self, number: int) -> str | None:
        """Return a clause for a message where ``number`` is over the limit; None where it is
        not.
        """
        if number <= self.maximum:
            return None
        return f"takes {number} {self.unit} when it is decoded, at most {self.maximum} are read"


MEMBER: Final = Limit("a member of a sample", 128 * _MIB)
SAMPLE: Final = Limit("a sample: its span, and what its compressed members decode to", 512 * _MIB)
LOGITS: Final = Limit("the arrays of one channel of logits in a sample", 128 * _MIB)
LOGITS_OF_SAMPLE: Final = Limit("the arrays of all logits of a sample", 512 * _MIB)
MASKS_OF_SAMPLE: Final = Limit(
    "the pixels of all masks of a sample, and of its other images that no camera took",
    512 * _MIB,
)
ATTRIBUTES: Final = Limit("a group of rows of `attributes.parquet`", 256 * _MIB)
UNTYPED: Final = Limit(
    "a text of JSON or YAML: settings, states, setups of a ledger, a channel of texts",
    16 * _MIB,
)
YAML_VALUES: Final = Limit("a text of YAML, aliases counted each time", _MIB, "values")
YAML_DEPTH: Final = Limit("a text of YAML, aliases followed", 64, "levels")
NAMES: Final = Limit("a file of keys or weights, which an order names", 512 * _MIB)
LEDGER: Final = Limit("a ledger", 256 * _MIB)
WITNESS: Final = Limit("a witness's record of an epoch", 16 * _MIB)
TABLE: Final = Limit(
    "of a source: a column in a row group of Parquet, a table of feather, a record batch of Arrow",
    512 * _MIB,
)
TABLE_OF_LOG: Final = Limit("of a source: a compressed table of Arrow of one log", 1024 * _MIB)

LIMITS: Final = (
    MEMBER,
    SAMPLE,
    LOGITS,
    LOGITS_OF_SAMPLE,
    MASKS_OF_SAMPLE,
    ATTRIBUTES,
    UNTYPED,
    YAML_VALUES,
    YAML_DEPTH,
    NAMES,
    LEDGER,
    WITNESS,
    TABLE,
    TABLE_OF_LOG,
)
"""All of them, in the order of the table."""
