"""MkDocs hook: pages that are elsewhere in the repository, references from the code, and links
between all of them.

A page is written once, for the repository: its links are relative to its place there. Here each
link is turned into one of the site. A file of the repository that is not a page is copied into the
site, so that the site is whole without a network.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import io
import os
import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import griffe
import msgspec
from mkdocs.structure.files import File

from fuelrail import __main__ as command_line
from fuelrail import errors
from fuelrail.pipeline.face import read_public_names

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT: Final = Path(__file__).resolve().parents[2]
PAGES: Final = {
    "index.md": "README.md",
    "CHANGELOG.md": "CHANGELOG.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "bench/DECISIONS.md": "bench/DECISIONS.md",
    "bench/RESULTS.md": "bench/RESULTS.md",
    "configs/recipes/README.md": "configs/recipes/README.md",
    "configs/trainers/README.md": "configs/trainers/README.md",
    "pipeline/format/FORMAT.md": "pipeline/format/FORMAT.md",
    "pipeline/order/ORDER.md": "pipeline/order/ORDER.md",
}
"""Pages of the site whose text is elsewhere in the repository."""
FENCE: Final = re.compile(r"^ *(```|~~~)")
LINK: Final = re.compile(r"\]\(([^)\s#]+)(#[^)\s]*)?\)")
NAMED_PAGE: Final = re.compile(r"(?<!\[)`((?:[\w.-]+/)*[\w.-]+\.md)`(?!\])")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are elsewhere, the references, and the files that pages link to."""
    for uri, place in PAGES.items():
        files.append(File.generated(config, uri, abs_src_path=str(ROOT / place)))
    files.append(File.generated(config, "reference/commands.md", content=commands_page()))
    files.append(File.generated(config, "reference/python.md", content=python_page()))
    known = {repository_path(file.src_uri) for file in files}
    for uri in [file.src_uri for file in files.documentation_pages()]:
        place = repository_path(uri)
        if not (ROOT / place).is_file():
            continue
        for target, _ in LINK.findall((ROOT / place).read_text(encoding="utf-8")):
            path = posixpath.normpath(posixpath.join(posixpath.dirname(place), target))
            if "://" not in target and path not in known and (ROOT / path).is_file():
                known.add(path)
                files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001
    """Turn links of the repository into links of the site; names of pages become links too."""
    place = repository_path(page.file.src_uri)
    pages = {repository_path(file.src_uri): file.src_uri for file in files}
    lines, fenced = [], False
    for line in markdown.splitlines():
        fenced ^= bool(FENCE.match(line))
        lines.append(line if fenced else linked(line, place, page.file.src_uri, pages))
    return "\n".join(lines)


def linked(line: str, place: str, uri: str, pages: dict[str, str]) -> str:
    """Return a line with its links as links of the site."""

    def site_link(target: str, *bases: str) -> str | None:
        for base in bases:
            path = posixpath.normpath(posixpath.join(base, target))
            if path in pages:
                return posixpath.relpath(pages[path], posixpath.dirname(uri) or ".")
        return None

    def rewritten(match: re.Match[str]) -> str:
        found = site_link(match[1], posixpath.dirname(place))
        return f"]({found}{match[2] or ''})" if found else match[0]

    def named(match: re.Match[str]) -> str:
        found = site_link(match[1], posixpath.dirname(place), "")
        return (
            f"[`{match[1]}`]({found})" if found and found != posixpath.basename(uri) else match[0]
        )

    return NAMED_PAGE.sub(named, LINK.sub(rewritten, line))


def repository_path(uri: str) -> str:
    """Return where the text of a page of the site is in the repository."""
    return PAGES.get(uri) or (uri if (ROOT / uri).is_file() and "/" in uri else f"docs/{uri}")


def commands_page() -> str:
    """Return what ``--help`` says, of every command."""
    parts = [
        "# Options of every command\n",
        "What `fuelrail COMMAND --help` prints. [Commands](../commands.md) says what each is for.\n",
    ]
    for word in command_line._COMMANDS:  # noqa: SLF001
        text = help_text(word)
        parts.append(f"## fuelrail {word}\n\n```text\n{text}```\n")
        subcommands = (
            re.findall(r"^    ([a-z]+)(?:  .*)?$", text, re.MULTILINE)
            if " WORD ..." in text
            else []
        )
        parts += [
            f"### fuelrail {word} {name}\n\n```text\n{help_text(word, name)}```\n"
            for name in subcommands
        ]
    return "\n".join(parts)


def help_text(*words: str) -> str:
    """Return what a command prints for ``--help``, in 80 columns."""
    text, columns = io.StringIO(), os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "80"
    try:
        with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
            command_line.main([*words, "--help"])
    finally:
        os.environ.pop("COLUMNS")
        if columns is not None:
            os.environ["COLUMNS"] = columns
    return text.getvalue()


def python_page() -> str:
    """Return the reference of all public names, by hall, errors last."""
    package = ROOT / ".src" / "fuelrail"
    groups: dict[str, dict[str, tuple[str, str]]] = {
        "Loading": {},
        "Datasets, orders, augmentation": {},
        "Making datasets": {},
        "Laboratory": read_public_names(package / "bench" / "__init__.pyi"),
        "Errors": {
            name: (errors.__name__, name)
            for name, value in vars(errors).items()
            if issubclass_of_exception(value)
        },
    }
    titles = {
        "loaders": "Loading",
        "pipeline": "Datasets, orders, augmentation",
        "sharding": "Making datasets",
    }
    for name, (module, attribute) in read_public_names(package / "__init__.pyi").items():
        hall = module.removeprefix("fuelrail.").partition(".")[0]
        if hall in titles and name not in {"errors", *groups["Errors"]}:
            groups[titles[hall]][name] = module, attribute
    parts = [
        "# Python\n",
        (
            "Every public name: `import fuelrail as fr`, then `fr.NAME`; those of the laboratory "
            "are `fuelrail.bench.NAME`, errors `fr.errors.NAME`. A name is imported when it is "
            "first used.\n"
        ),
    ]
    for title, places in groups.items():
        parts.append(f"## {title}\n")
        for name in sorted(places, key=str.lower):
            module, attribute = places[name]
            parts += reference_of(name, module, attribute)
    return "\n".join(parts)


def reference_of(name: str, module: str, attribute: str) -> Iterator[str]:
    """Yield the reference of one public name; of a struct with described fields their table."""
    value = getattr(importlib.import_module(module), attribute)
    fields = (
        list(described_fields(value))
        if isinstance(value, type) and issubclass(value, msgspec.Struct)
        else []
    )
    yield f"::: {module}.{attribute}"
    yield "    options:"
    yield f"      heading: {name}\n      toc_label: {name}"
    if fields:
        yield "      members: false\n      show_signature: false\n"
        yield "| field | type | default | meaning |\n|---|---|---|---|\n" + "\n".join(fields) + "\n"
    else:
        yield "      members: []\n" if issubclass_of_exception(value) else ""


class PlainTypes(griffe.Extension):
    """Shows ``Annotated[int, Meta(...)]`` as ``int``: the rest is for the checks, and its words
    are in the text.
    """

    def on_attribute(self, *, attr: griffe.Attribute, **_: Any) -> None:
        """Change the annotation of an attribute that was found."""
        attr.annotation = plain_annotation(attr.annotation)


def plain_annotation(annotation: str | griffe.Expr | None) -> str | griffe.Expr | None:
    """Return an annotation without `Annotated`."""
    if isinstance(annotation, griffe.ExprSubscript) and str(annotation.left) == "Annotated":
        inner = annotation.slice
        return plain_annotation(inner.elements[0] if isinstance(inner, griffe.ExprTuple) else inner)
    if isinstance(annotation, griffe.ExprBinOp):
        return dataclasses.replace(
            annotation,
            left=plain_annotation(annotation.left),
            right=plain_annotation(annotation.right),
        )
    return annotation


def issubclass_of_exception(value: Any) -> bool:
    """Whether a public name is an error."""
    return isinstance(value, type) and issubclass(value, Exception)


def described_fields(struct: type[msgspec.Struct]) -> Iterator[str]:
    """Yield a row for each field that has a description: the flags of a command."""
    info = msgspec.inspect.type_info(struct)
    assert isinstance(info, msgspec.inspect.StructType), "a struct"
    for field in info.fields:
        about: dict[str, Any] = {}
        kinds = sorted(set(plain_types(field.type, about)))
        if "description" in about:
            default = "" if field.default is msgspec.NODEFAULT else f"`{field.default!r}`"
            text = str(about["description"]).replace("|", "\\|")
            yield f"| `{field.name}` | {', '.join(kinds)} | {default} | {text} |".replace("\n", " ")


def plain_types(kind: msgspec.inspect.Type, about: dict[str, Any]) -> Iterator[str]:
    """Yield the names of a field's types; ``about`` gets its description."""
    inspect = msgspec.inspect
    if isinstance(kind, inspect.Metadata):
        about.update(kind.extra_json_schema or {})
        yield from plain_types(kind.type, about)
    elif isinstance(kind, inspect.UnionType):
        for part in kind.types:
            yield from plain_types(part, about)
    elif isinstance(kind, inspect.LiteralType):
        yield from (f"`{value!r}`" for value in kind.values)
    elif isinstance(kind, inspect.StructType):
        yield f"`{kind.cls.__name__}`"
    else:
        yield type(kind).__name__.removesuffix("Type").lower()
