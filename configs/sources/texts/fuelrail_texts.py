"""Texts of other files as a layer: questions and answers, captions; joined by the names that the
source gave samples.

::

    fuelrail-texts DATASET LAYER v1_1_train_nus.json
    python -m fuelrail_texts DATASET LAYER captions.jsonl --by image_id --count tokens:count

A file is DriveLM's JSON (scenes, their key frames, and of each the questions by task), or it has
*records*, objects that name their sample.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import pkgutil
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
import numpy as np

import fuelrail as fr
from fuelrail.pipeline.runtime.workers import in_threads
from fuelrail.pipeline.text import shortened, text_of
from fuelrail.sharding.sources.shared.files import source_files
from fuelrail.sharding.sources.shared.foreign import parsing, read_json, read_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_NAMES: Final = ("sample_token", "token", "key")
_LISTED: Final = 1000
_THREADS: Final = 8
_ENTRIES: Final = "num_entries"
_RENAMED: Final = {"q": "question", "a": "answer"}
_FORMS: Final = """Make a layer of texts: DriveLM, NuScenes-QA, or records in JSON.

DriveLM's JSON gives the channels question, answer, task, and other fields that are not null, such
as tag; scene_description and key_objects (JSON), one text a sample. JSON lines (.jsonl), a JSON
list, or a list under "questions", as in NuScenes-QA, give every field but the one that names the
sample, by key or sample_token: sample_token, token, key, or --by. Unknown names are listed.

A field is a channel of kind texts: a sample's entries in the order of the files, as many as other
fields have; none if the sample has no entries. Other values are stored as JSON; a list of n texts
makes n entries. num_entries is their number. With --count, a function from a text to its tokens or
their number, there are question_tokens, answer_tokens and so on. In Python: import_texts.
"""
Record = dict[str, msgspec.Raw]


class TextsReport(msgspec.Struct, frozen=True, kw_only=True):
    """A layer of texts: ``num_samples`` of the base have entries, ``num_empty`` none.

    ``unknown`` are the names of no sample of the base.
    """

    layer: str
    fingerprint: str
    channels: list[str]
    num_entries: int
    num_samples: int
    num_empty: int
    unknown: list[str]

    def as_text(self) -> str:
        """Return the report for people; it lists 1,000 unknown names at most."""
        lines = [
            (
                f"{self.layer}: {self.num_entries:,} entries of {self.num_samples:,} "
                f"samples, fingerprint {self.fingerprint}; channels {', '.join(self.channels)}"
            ),
            f"{self.num_empty:,} samples without an entry, {len(self.unknown):,} names of no sample",
        ]
        return (
            text_of([*lines, *(f"  no sample: {name}" for name in self.unknown[:_LISTED])]) + "\n"
        )


class _KeyFrame(msgspec.Struct, frozen=True):
    tasks: dict[str, list[Record]] = msgspec.field(name="QA")
    objects: msgspec.Raw = msgspec.field(name="key_object_infos", default=msgspec.Raw(b"null"))


class _Scene(msgspec.Struct, frozen=True):
    key_frames: dict[str, _KeyFrame]
    scene_description: str | None = None


class _Entries(NamedTuple):
    """What a sample has: entries, each a text by name, and texts of the sample as a whole."""

    rows: list[dict[str, str]]
    whole: dict[str, str]


def import_texts(
    base: str | os.PathLike[str],
    out: str | os.PathLike[str],
    files: Sequence[str | os.PathLike[str]],
    *,
    by: str | None = None,
    count: Callable[[str], Any] | str | None = None,
) -> TextsReport:
    """Make a layer of the texts in ``files``; each field of the entries becomes a channel of kind
    ``texts``.

    All channels of a sample have as many texts as it has entries, in the order of the files, the
    empty text where an entry lacks the field. Samples are found by key or by the source's name for
    them (``sample_token``), which the field ``by`` of a record has. A list of texts is as many
    entries; what is neither text nor such a list is kept as JSON. Of DriveLM the channels are
    question, answer, task and what else its entries have; and two of kind ``text``:
    ``scene_description`` and ``key_objects``, as JSON. ``num_entries`` is a number for each sample,
    and so is ``{name}_tokens`` where ``count`` is given: a function from text to its tokens or
    their number, or MODULE:FUNCTION.

    Raises SourceError for a file that is of none of these forms, DatasetError where no sample has
    one of the names, ConfigError for names that cannot be channels.
    """
    dataset = fr.open(base)
    found = dict[str, _Entries]()
    digests = list[str]()
    for path in map(Path, files):
        data = source_files(str(path.parent), path.name).read(path.name)
        where = f"file '{path}'"
        read_text(data, where)  # JSON of no stated type may hold other bytes
        digests.append(hashlib.sha256(data).hexdigest())
        with parsing(where):
            for name, rows, whole in _entries(data, where, is_lines=path.suffix == ".jsonl", by=by):
                own = found.setdefault(name, _Entries([], {}))
                own.rows.extend(rows)
                own.whole.update(whole)
    of_row, unknown = _joined(dataset, found)
    names = list(dict.fromkeys(name for own in found.values() for row in own.rows for name in row))
    whole = list(dict.fromkeys(name for own in found.values() for name in own.whole))
    size = _counter(count) if count is not None else None
    numbers = [_ENTRIES, *(f"{name}_tokens" for name in names if size is not None)]
    fixed = {"law": {"name": "fixed"}}
    table = [
        *({**fixed, "name": name, "kind": "texts", "field": f"{name}.json"} for name in names),
        *(
            {**fixed, "name": name, "kind": "text", "field": f"{name}.txt", "optional": True}
            for name in whole
        ),
        *(
            {**fixed, "name": name, "kind": "array", "field": f"{name}.npy", "dtype": "int64"}
            for name in numbers
        ),
    ]
    recipe = {
        "texts": digests,
        "by": by,
        "count": count if count is None or isinstance(count, str) else repr(count),
    }
    with fr.LayerWriter(dataset, out, channels=table, recipe=recipe) as writer:
        for position in range(len(dataset)) if not writer.is_finished else ():
            rows, singles = of_row.get(position, _Entries([], {}))
            texts = {name: [row.get(name, "") for row in rows] for name in names}
            values = {**texts, **singles, _ENTRIES: np.int64(len(rows))}
            if size is not None:
                values |= {
                    f"{name}_tokens": np.int64(sum(map(size, texts[name]))) for name in names
                }
            writer.write(position, values)
    return TextsReport(
        layer=os.fspath(out),
        fingerprint=writer.finish().fingerprint,
        channels=[one["name"] for one in table],
        num_entries=sum(len(own.rows) for own in of_row.values()),
        num_samples=len(of_row),
        num_empty=len(dataset) - len(of_row),
        unknown=unknown,
    )


def _entries(
    data: bytes, where: str, *, is_lines: bool, by: str | None
) -> Iterator[tuple[str, list[dict[str, str]], dict[str, str]]]:
    """Yield the name of a sample, entries, and texts of the sample as a whole."""
    if is_lines:
        lines = ((number, line) for number, line in enumerate(data.split(b"\n"), 1) if line.strip())
        records = [read_json(line, f"{where}, line {number}", Record) for number, line in lines]
    elif data.lstrip()[:1] == b"[":
        records = read_json(data, where, list[Record])
    else:
        facts = read_json(data, where, Record)
        if "questions" not in facts:
            for token, raw in facts.items():
                scene = read_json(bytes(raw), f"{where}, scene '{shortened(token)}'", _Scene)
                for name, frame in scene.key_frames.items():
                    texts = {
                        "scene_description": scene.scene_description,
                        "key_objects": _text(frame.objects),
                    }
                    rows = [
                        {**_fields(one, where), "task": task}
                        for task, all_ in frame.tasks.items()
                        for one in all_
                    ]
                    yield name, rows, {key: text for key, text in texts.items() if text}
            return
        records = read_json(bytes(facts["questions"]), f"{where}, questions", list[Record])
    for number, record in enumerate(records, 1):
        field = by or next((name for name in _NAMES if name in record), _NAMES[0])
        if not isinstance(name := _value(record.pop(field, None)), str) or not name:
            raise fr.errors.SourceError(
                f"{where}, record {number}: the field '{field}' must name the sample; it "
                f"has: {', '.join(record):.200}"
            )
        fields = {
            _plain(key): value for key, raw in record.items() if (value := _value(raw)) is not None
        }
        lists = {key: value for key, value in fields.items() if isinstance(value, list)}
        if len({len(value) for value in lists.values()}) > 1:
            sizes = ", ".join(f"{key} {len(value)}" for key, value in lists.items())
            raise fr.errors.SourceError(
                f"{where}, record {number}: its lists of texts differ in length: {sizes:.200}"
            )
        size = len(next(iter(lists.values()), [""]))
        yield (
            name,
            [
                {key: one[at] if key in lists else one for key, one in fields.items()}
                for at in range(size)
            ],
            {},
        )


def _fields(record: Record, where: str) -> dict[str, str]:
    """Return the texts of one of DriveLM's questions."""
    with parsing(where):
        return {_plain(key): text for key, raw in record.items() if (text := _text(raw))}


def _value(raw: msgspec.Raw | None) -> str | list[str] | None:
    """Return a text, a list of texts, or other JSON as text; None for null."""
    if raw is None or bytes(raw) == b"null":
        return None
    try:
        found: str | list[str] = msgspec.json.decode(raw, type=str | list[str])
    except msgspec.ValidationError:
        return msgspec.json.format(bytes(raw), indent=-1).decode()
    return found


def _text(raw: msgspec.Raw | None) -> str | None:
    found = _value(raw)
    return found if isinstance(found, str | None) else msgspec.json.encode(found).decode()


def _plain(field: str) -> str:
    """Return the channel of a field."""
    name = re.sub(r"[^a-z0-9_]", "_", field.lower())[:100]
    return _RENAMED.get(name, name)


def _joined(
    dataset: fr.Dataset, found: dict[str, _Entries]
) -> tuple[dict[int, _Entries], list[str]]:
    """Return the entries by position, and the names that no sample has; the source's names are
    read if keys fail.
    """
    places: dict[str, list[int]] = {}
    for position, key in enumerate(dataset.index.texts("key").to_pylist()):
        places.setdefault(key, []).append(position)
    if not found.keys() <= places.keys():
        tokens = in_threads(
            lambda at: dataset.read(at, "meta")["meta"].sample_token, range(len(dataset)), _THREADS
        )
        for position, token in enumerate(tokens):
            if position not in places.get(token, ()):
                places.setdefault(token, []).append(position)
    of_row = {position: own for name, own in found.items() for position in places.get(name, ())}
    if not of_row:
        first = next(iter(found), "")
        raise fr.errors.DatasetError(
            f"no sample of '{dataset.location}' has a name of the texts as its key or "
            f"sample_token, such as '{shortened(first)}': are they of another dataset, or "
            "is the name in another field (--by)?"
        )
    return of_row, [name for name in found if name not in places]


def _counter(count: Callable[[str], Any] | str) -> Callable[[str], int]:
    """Return a function from text to number of tokens; a name is imported, from the working
    folder too.
    """
    if isinstance(count, str):
        sys.path.insert(0, os.getcwd())  # noqa: PTH109 - as the interpreter itself does for `python -m`
        try:
            count = pkgutil.resolve_name(count)
        except (ImportError, AttributeError, ValueError) as error:
            raise fr.errors.ConfigError(
                f"count {count!r} must be MODULE:FUNCTION that can be imported: {error}"
            ) from error
        finally:
            del sys.path[0]
    given: Any = count

    def size(text: str) -> int:
        tokens = given(text)
        return tokens if isinstance(tokens, int) else len(tokens)

    return size


def main(argv: Sequence[str] | None = None) -> None:
    """Make the layer and print the report."""
    parser = argparse.ArgumentParser(
        description=_FORMS, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("dataset", metavar="DATASET", help="folder or URL of the dataset")
    parser.add_argument(
        "layer",
        metavar="LAYER",
        help="folder or URL of the layer: new, empty, or of a partial layer",
    )
    parser.add_argument("files", metavar="FILE", nargs="+", help="JSON, or JSON lines (.jsonl)")
    parser.add_argument(
        "--by", help=f"field of a record that names its sample (default: {', '.join(_NAMES)})"
    )
    parser.add_argument(
        "--count", metavar="MODULE:FUNCTION", help="makes tokens of a text, or counts them"
    )
    args = parser.parse_args(argv)
    try:
        report = import_texts(args.dataset, args.layer, args.files, by=args.by, count=args.count)
    except fr.errors.FuelrailError as error:
        raise SystemExit(f"fuelrail-texts: {error}") from error
    sys.stdout.write(report.as_text())


if __name__ == "__main__":
    main()
