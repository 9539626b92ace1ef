"""What a folder hands to the command line: one `Command` for each word of ``fuelrail WORD``, and
flags from structs.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, NamedTuple, TypeAlias, TypeVar

import msgspec
from msgspec import inspect

from fuelrail.pipeline.errors import ConfigError
from fuelrail.pipeline.settings import (
    Settings,
    find_fault,
    flag,
    load_yaml,
    preset_files,
    presets,
)
from fuelrail.pipeline.text import json_text

S = TypeVar("S", bound=msgspec.Struct)
Run: TypeAlias = "Callable[[argparse.Namespace], int]"


class Command(NamedTuple):
    """One command: its one-line help, the function that declares its arguments, and the one that
    runs it.

    ``run`` returns the process's exit code. An error that the user can fix is raised as a
    :class:`fuelrail.pipeline.errors.FuelrailError`; the entry point prints it as one sentence.
    """

    help: str
    configure: Callable[[argparse.ArgumentParser], None]
    run: Run


class Argument(NamedTuple):
    """A positional argument of a command."""

    name: str
    metavar: str
    help: str
    nargs: str | None = None


def command(
    commands: dict[str, Command],
    *arguments: Argument,
    options: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Callable[[Run], Run]:
    """Make a command of the function ``run_WORD`` that follows, and put it into ``commands``.

    Its docstring is the help: the first sentence in lists, what follows in ``--help``. ``options``
    are structs, as ``module:Name``, whose modules are imported when the command is used.
    ``environment`` is set before, where it does not say otherwise.
    """

    def configure(parser: argparse.ArgumentParser, details: str) -> None:
        for name, value in (environment or {}).items():
            os.environ.setdefault(name, value)
        if details:
            parser.description = " ".join(details.split())
        for argument in arguments:
            parser.add_argument(
                argument.name,
                metavar=argument.metavar,
                nargs=argument.nargs,
                help=argument.help,
            )
        for option in options:
            module_name, name = option.split(":")
            module = importlib.import_module(f"fuelrail.{module_name}")
            add_flags(
                parser,
                getattr(module, name),
                names=getattr(module, "FLAGS", None),
            )

    def register(run: Run) -> Run:
        summary, _, details = (run.__doc__ or "").partition("\n\n")
        summary = " ".join(summary.split())
        commands[run.__name__.removeprefix("run_")] = Command(
            help=f"{summary[:1].lower()}{summary[1:].rstrip('.')}",
            configure=partial(configure, details=details),
            run=run,
        )
        return run

    return register


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: ``1 shard``, ``2,000 shards``."""
    if number == 1:
        return f"1 {noun}"
    return f"{number:,} {noun}s"


def add_flags(
    parser: argparse.ArgumentParser | argparse._ArgumentGroup,
    kind: type[msgspec.Struct],
    *,
    names: Mapping[str, str] | None = None,
) -> None:
    """Add a flag for every field of a struct that has a description; :func:`from_flags` makes the
    struct.

    Type, default, choices and help come from the field: ``Annotated[int, msgspec.Meta(ge=1,
    description="...")] = 4`` or ``Annotated[int, flag("...")] = 4``, and ``Annotated[int | None,
    flag("...")] = None`` for a flag without default. A field without a default is a required flag.
    Flag names come from field names (``--num-clips``) or from ``names`` (field to flag, without
    hyphens in front). A bool that is True by default becomes ``--no-NAME``; a list takes one or
    more values, or with ``extra={"repeat": True}`` one value each time that the flag is given; a
    field that holds settings takes the path of a YAML file. ``"short": "-o"`` in ``extra`` adds a
    short name. ``Meta(extra={"metavar": "SIZE", "parse": parse_size})`` names the value in the help
    and converts its text; ``parse`` raises ConfigError.
    """
    flags: dict[str, str] = {}
    for field in _described(kind):
        flags[field.name] = f"--{(names or {}).get(field.name, field.flag)}"
        parser.add_argument(
            *field.short,
            flags[field.name],
            dest=f"{kind.__name__}.{field.name}",
            required=field.required,
            default=argparse.SUPPRESS,
            help=field.help,
            **field.arguments,
        )
    parser.set_defaults(**{_flags_of(kind): flags})


def given_flags(args: argparse.Namespace, kind: type[msgspec.Struct]) -> dict[str, str]:
    """Return the flags of a struct that the command line has: field to flag."""
    flags: dict[str, str] = getattr(args, _flags_of(kind))
    prefix = f"{kind.__name__}."
    return {name: text for name, text in flags.items() if prefix + name in args}


def from_flags(args: argparse.Namespace, kind: type[S]) -> S:
    """Return the struct that the flags describe; raises ConfigError naming the flag whose value
    is not allowed.
    """
    flags = given_flags(args, kind)
    texts = {name: getattr(args, f"{kind.__name__}.{name}") for name in flags}
    values = dict(texts)
    for field in _described(kind):
        name = field.name
        if field.parse is not None and name in flags:
            try:
                values[name] = field.parse(texts[name])
            except ConfigError as error:
                raise ConfigError(f"{flags[name]} {texts[name]!r}: {error}") from error
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        fault = find_fault(error, values, kind, names_none=False)
        name, *_ = re.split(r"[.\[]", fault.path)
        if name not in flags:
            raise ConfigError(str(fault)) from error
        flag = f"{flags[name]} {texts[name]}"
        if name == fault.path:  # the flag says the value already
            raise ConfigError(f"{flag}: {fault.rule}{fault.hint}") from error
        raise ConfigError(f"{flag}: {fault}") from error


class _Field(NamedTuple):
    """A field of a struct as a flag: ``arguments`` are argparse's for its type."""

    name: str
    flag: str
    help: str
    required: bool
    parse: Callable[[str], object] | None
    arguments: dict[str, Any]
    short: tuple[str, ...] = ()


def _flags_of(kind: type[msgspec.Struct]) -> str:
    return f"flags of {kind.__name__}"


def _described(kind: type[msgspec.Struct]) -> Iterator[_Field]:
    info = inspect.type_info(kind)
    assert isinstance(info, inspect.StructType), "a struct"
    for field in info.fields:
        meta: dict[str, Any] = {}
        types = list(_plain_types(field.type, meta))
        if "description" not in meta:
            continue
        name = field.name.replace("_", "-")
        help_text = str(meta["description"])
        default = field.default
        if isinstance(types[0], inspect.BoolType):
            is_on = default is True
            yield _Field(
                name=field.name,
                flag=f"no-{name}" if is_on else name,
                help=help_text.replace("%", "%%"),
                required=False,
                parse=None,
                arguments={"action": "store_false" if is_on else "store_true"},
            )
            continue
        has_default = not field.required and isinstance(default, int | float | str)
        if has_default and "default" not in help_text:
            help_text += f" (default: {default})"
        is_number = isinstance(types[0], inspect.IntType | inspect.FloatType)
        parse = meta.get("parse")
        metavar = "N" if is_number else field.name.upper()
        if parse is None and isinstance(types[0], inspect.StructType):
            kind = types[0].cls
            parse = partial(load_yaml, to=kind)
            metavar = "PRESET_OR_YAML" if preset_files(kind) else "YAML"
        arguments: dict[str, Any] = {}
        if parse is None:
            arguments = _arguments(types, f"{kind.__name__}.{field.name}")
        if meta.get("repeat"):
            arguments.update(action="append")
            del arguments["nargs"]
        if "choices" not in arguments or meta.get("metavar"):
            arguments["metavar"] = meta.get("metavar", metavar)
        short = (meta["short"],) if "short" in meta else ()
        yield _Field(
            name=field.name,
            flag=name,
            help=help_text.replace("%", "%%"),
            required=field.required,
            parse=parse,
            arguments=arguments,
            short=short,
        )


def _plain_types(kind: inspect.Type, meta: dict[str, Any]) -> Iterator[inspect.Type]:
    """Yield the types of a field, without None; ``meta`` gets what their Meta says."""
    if isinstance(kind, inspect.Metadata):
        meta |= kind.extra_json_schema or {}
        meta |= kind.extra or {}
        yield from _plain_types(kind.type, meta)
    elif isinstance(kind, inspect.UnionType):
        for part in kind.types:
            yield from _plain_types(part, meta)
    elif not isinstance(kind, inspect.NoneType):
        yield kind


def _arguments(types: list[inspect.Type], field: str) -> dict[str, Any]:
    """Return argparse's arguments for a value of these types."""
    kinds = {type(kind) for kind in types}
    if kinds == {inspect.LiteralType}:
        values: list[Any] = []
        for kind in types:
            if isinstance(kind, inspect.LiteralType):
                values += kind.values
        return {"choices": values}
    if isinstance(types[0], inspect.ListType | inspect.VarTupleType):
        item_types = list(_plain_types(types[0].item_type, {}))
        arguments = _arguments(item_types, field)
        return {"nargs": "+", **arguments}
    if kinds == {inspect.StrType}:
        return {}
    if kinds == {inspect.IntType}:
        return {"type": int}
    is_number = kinds <= {inspect.FloatType, inspect.IntType}
    if is_number and inspect.FloatType in kinds:
        return {"type": float}
    is_number_or_text = kinds <= {inspect.IntType, inspect.LiteralType, inspect.StrType}
    if is_number_or_text and inspect.IntType in kinds:
        return {"type": _number_or_text}
    raise TypeError(f"{field}: a flag for this type needs Meta(extra={{'parse': ...}})")


def _number_or_text(text: str) -> int | str:
    if re.fullmatch(r"-?[0-9]+", text):
        return int(text)
    return text


class PrintOptions(Settings, frozen=True, kw_only=True):
    """How a command prints its report."""

    json: Annotated[
        bool,
        flag("print JSON instead of text; JSON lines where there is progress to report"),
    ] = False


def print_json(value: object) -> None:
    """Print a value as indented JSON."""
    sys.stdout.write(json_text(value))


COMMANDS: dict[str, Command] = {}


@command(COMMANDS, options=["pipeline.cli:PrintOptions"])
def run_presets(args: argparse.Namespace) -> int:
    """List the settings that can be given by name: images, ego frame, pixel values, orders,
    scenarios.
    """
    report = presets()
    if from_flags(args, PrintOptions).json:
        print_json(report)
    else:
        print(report.as_text())  # noqa: T201
    return 0


@command(
    COMMANDS,
    Argument(
        "endpoints",
        "URL",
        "metrics endpoint of a loader, HOST:PORT or URL; one for each rank",
        nargs="+",
    ),
    options=["pipeline.runtime.top:TopOptions"],
)
def run_top(args: argparse.Namespace) -> int:
    """Watch running loaders: stages, queues, and how well they feed the trainer."""
    from fuelrail.pipeline.runtime.top import TopOptions, show

    with contextlib.suppress(KeyboardInterrupt):  # the usual way to end it
        show(args.endpoints, from_flags(args, TopOptions))
    return 0
