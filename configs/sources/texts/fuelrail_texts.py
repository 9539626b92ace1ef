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
    from collections.abc import Callable, Iterable, Iterator, KeysView, Sequence

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


class _SampleTexts(NamedTuple):
    """What a sample has: entries, each a text by name, and texts of the sample as a whole."""

    entries: list[dict[str, str]]
    singles: dict[str, str]


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
    texts: dict[str, _SampleTexts] = {}
    digests: list[str] = []
    for path in map(Path, files):
        data = source_files(str(path.parent), path.name).read(path.name)
        where = f"file '{path}'"
        read_text(data, where)  # JSON of no stated type may hold other bytes
        digests.append(hashlib.sha256(data).hexdigest())
        with parsing(where):
            for name, sample in _read_samples(data, where, is_lines=path.suffix == ".jsonl", by=by):
                merged = texts.setdefault(name, _SampleTexts([], {}))
                merged.entries.extend(sample.entries)
                merged.singles.update(sample.singles)
    positions = _find_positions(dataset, texts.keys())
    texts_of_position: dict[int, _SampleTexts] = {}
    for name, sample in texts.items():
        texts_of_position.update(dict.fromkeys(positions.get(name, ()), sample))
    names: dict[str, None] = {}
    single_names: dict[str, None] = {}
    for sample in texts.values():
        for entry in sample.entries:
            names.update(dict.fromkeys(entry))
        single_names.update(dict.fromkeys(sample.singles))
    count_tokens = _make_counter(count) if count is not None else None
    channels = _make_channels(names, single_names, has_tokens=count_tokens is not None)
    recipe = {
        "texts": digests,
        "by": by,
        "count": count if count is None or isinstance(count, str) else repr(count),
    }
    with fr.LayerWriter(dataset, out, channels=channels, recipe=recipe) as writer:
        num_missing = 0 if writer.is_finished else len(dataset)
        for position in range(num_missing):
            sample = texts_of_position.get(position, _SampleTexts([], {}))
            values: dict[str, Any] = {}
            for name in names:
                values[name] = [entry.get(name, "") for entry in sample.entries]
            values |= sample.singles
            values[_ENTRIES] = np.int64(len(sample.entries))
            if count_tokens is not None:
                for name in names:
                    values[f"{name}_tokens"] = np.int64(sum(map(count_tokens, values[name])))
            writer.write(position, values)
    num_entries = sum(len(sample.entries) for sample in texts_of_position.values())
    return TextsReport(
        layer=os.fspath(out),
        fingerprint=writer.finish().fingerprint,
        channels=[channel["name"] for channel in channels],
        num_entries=num_entries,
        num_samples=len(texts_of_position),
        num_empty=len(dataset) - len(texts_of_position),
        unknown=[name for name in texts if name not in positions],
    )


def _make_channels(
    names: Iterable[str],
    single_names: Iterable[str],
    *,
    has_tokens: bool,
) -> list[dict[str, Any]]:
    """Return the table of channels: texts of the entries, texts of the sample, numbers."""
    law = {"name": "fixed"}
    lists = [{"law": law, "name": name, "kind": "texts", "field": f"{name}.json"} for name in names]
    singles = [
        {"law": law, "name": name, "kind": "text", "field": f"{name}.txt", "optional": True}
        for name in single_names
    ]
    number_names = [_ENTRIES]
    if has_tokens:
        number_names += [f"{name}_tokens" for name in names]
    numbers = [
        {"law": law, "name": name, "kind": "array", "field": f"{name}.npy", "dtype": "int64"}
        for name in number_names
    ]
    return [*lists, *singles, *numbers]


def _read_samples(
    data: bytes,
    where: str,
    *,
    is_lines: bool,
    by: str | None,
) -> Iterator[tuple[str, _SampleTexts]]:
    """Yield the names of samples, each with texts; a name may come again with more."""
    if is_lines:
        records = [
            read_json(line, f"{where}, line {number}", Record)
            for number, line in enumerate(data.split(b"\n"), 1)
            if line.strip()
        ]
    elif data.lstrip()[:1] == b"[":
        records = read_json(data, where, list[Record])
    else:
        fields = read_json(data, where, Record)
        if "questions" not in fields:
            yield from _read_drivelm(fields, where)
            return
        records = read_json(bytes(fields["questions"]), f"{where}, questions", list[Record])
    for number, record in enumerate(records, 1):
        yield _read_record(record, f"{where}, record {number}", by)


def _read_drivelm(scenes: Record, where: str) -> Iterator[tuple[str, _SampleTexts]]:
    """Yield the names of DriveLM's key frames, each with its questions."""
    for token, raw in scenes.items():
        scene = read_json(bytes(raw), f"{where}, scene '{shortened(token)}'", _Scene)
        for name, frame in scene.key_frames.items():
            singles = {
                "scene_description": scene.scene_description,
                "key_objects": _read_text(frame.objects),
            }
            entries: list[dict[str, str]] = []
            for task, questions in frame.tasks.items():
                for question in questions:
                    with parsing(where):
                        fields = {key: _read_text(value) for key, value in question.items()}
                    entry = {_name_channel(key): text for key, text in fields.items() if text}
                    entries.append({**entry, "task": task})
            yield name, _SampleTexts(entries, {key: text for key, text in singles.items() if text})


def _read_record(record: Record, where: str, by: str | None) -> tuple[str, _SampleTexts]:
    """Return the name of a record's sample, and the entries that the record makes."""
    field = by or next((name for name in _NAMES if name in record), _NAMES[0])
    name = _read_value(record.pop(field, None))
    if not isinstance(name, str) or not name:
        raise fr.errors.SourceError(
            f"{where}: the field '{field}' must name the sample; it has: {', '.join(record):.200}"
        )
    fields: dict[str, str | list[str]] = {}
    for key, raw in record.items():
        value = _read_value(raw)
        if value is not None:
            fields[_name_channel(key)] = value
    sizes = {key: len(value) for key, value in fields.items() if isinstance(value, list)}
    if len(set(sizes.values())) > 1:
        text = ", ".join(f"{key} {size}" for key, size in sizes.items())
        raise fr.errors.SourceError(f"{where}: its lists of texts differ in length: {text:.200}")
    entries: list[dict[str, str]] = []
    for number in range(max(sizes.values(), default=1)):
        entry: dict[str, str] = {}
        for key, value in fields.items():
            entry[key] = value[number] if isinstance(value, list) else value
        entries.append(entry)
    return name, _SampleTexts(entries, {})


def _read_value(raw: msgspec.Raw | None) -> str | list[str] | None:
    """Return a text, a list of texts, or other JSON as text; None for null."""
    if raw is None or bytes(raw) == b"null":
        return None
    try:
        value: str | list[str] = msgspec.json.decode(raw, type=str | list[str])
    except msgspec.ValidationError:
        return msgspec.json.format(bytes(raw), indent=-1).decode()
    return value


def _read_text(raw: msgspec.Raw | None) -> str | None:
    """Return a text, or other JSON as text; None for null."""
    value = _read_value(raw)
    return msgspec.json.encode(value).decode() if isinstance(value, list) else value


def _name_channel(field: str) -> str:
    """Return the channel of a field."""
    name = re.sub(r"[^a-z0-9_]", "_", field.lower())[:100]
    return _RENAMED.get(name, name)


def _find_positions(dataset: fr.Dataset, names: KeysView[str]) -> dict[str, list[int]]:
    """Return the positions of samples by key; where a name is no key, by the source's names too.

    Raises DatasetError where no sample has one of ``names``.
    """
    positions: dict[str, list[int]] = {}
    for position, key in enumerate(dataset.index.texts("key").to_pylist()):
        positions.setdefault(key, []).append(position)
    if not names <= positions.keys():

        def read_token(position: int) -> str:
            return dataset.read(position, "meta")["meta"].sample_token

        tokens = in_threads(read_token, range(len(dataset)), _THREADS)
        for position, token in enumerate(tokens):
            if position not in positions.get(token, ()):
                positions.setdefault(token, []).append(position)
    if names.isdisjoint(positions):
        first = next(iter(names), "")
        raise fr.errors.DatasetError(
            f"no sample of '{dataset.location}' has a name of the texts as its key or "
            f"sample_token, such as '{shortened(first)}': are they of another dataset, or "
            "is the name in another field (--by)?"
        )
    return positions


def _make_counter(count: Callable[[str], Any] | str) -> Callable[[str], int]:
    """Return a function from text to number of tokens; a name is imported, from the working
    folder too.
    """
    tokenize: Any = count
    if isinstance(count, str):
        sys.path.insert(0, os.getcwd())  # noqa: PTH109 - as the interpreter itself does for `python -m`
        try:
            tokenize = pkgutil.resolve_name(count)
        except (ImportError, AttributeError, ValueError) as error:
            raise fr.errors.ConfigError(
                f"count {count!r} must be MODULE:FUNCTION that can be imported: {error}"
            ) from error
        finally:
            del sys.path[0]

    def count_tokens(text: str) -> int:
        tokens = tokenize(text)
        return tokens if isinstance(tokens, int) else len(tokens)

    return count_tokens


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
