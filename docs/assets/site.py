"""MkDocs hook: pages that are elsewhere in the repository, references from the code, links between
all of them, and ``llms.txt``, which says in a line each what they are.

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
import sys
import tomllib
from collections import Counter
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import griffe
import msgspec
from mkdocs.structure.files import File

from fuelrail import __main__ as command_line
from fuelrail import errors
from fuelrail.bench.report.files import load_report_of
from fuelrail.bench.studies.resume import session as resume
from fuelrail.bench.studies.resume.session import ResumeReport
from fuelrail.bench.studies.watch.judge import ADVICE
from fuelrail.pipeline.face import read_public_names
from fuelrail.pipeline.limits import LIMITS
from fuelrail.sharding.sources import registry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

    from fuelrail.sharding.sources.registry import SourceOption

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
Names: TypeAlias = dict[str, tuple[str, str]]
"""Public names as programs write them, each with its module and its name there."""
FENCE: Final = re.compile(r"^ *(```|~~~)")
LINK: Final = re.compile(r"\]\(([^)\s#]+)(#[^)\s]*)?\)")
PARAGRAPH: Final = re.compile(r"(?!\d+\. |[-*+] )[\w*`\[]")
SENTENCE: Final = re.compile(r".+?[.!?](?=\s+[A-Z`\"(]|$)|.+")
MADE: Final = re.compile(r"^<!-- made: (\w+) -->$", re.MULTILINE)
"""In the place of such a line a page of the site has a table that is made here."""
NAMED_PAGE: Final = re.compile(r"(?<!\[)`((?:[\w.-]+/)*[\w.-]+\.md)`(?!\])")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are elsewhere, the references, the files that pages link to, and
    ``llms.txt``.
    """
    for uri, place in PAGES.items():
        files.append(File.generated(config, uri, abs_src_path=str(ROOT / place)))
    groups = public_groups()
    files.append(File.generated(config, "reference/commands.md", content=commands_page()))
    files.append(File.generated(config, "reference/names.md", content=names_page(groups)))
    files.append(File.generated(config, "reference/python.md", content=python_page(groups)))
    files.append(File.generated(config, "reference/sources.md", content=sources_page()))
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
    files.append(File.generated(config, "llms.txt", content=llms_text(config, files, groups)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001
    """Turn links of the repository into links of the site; names of pages become links too."""
    place = repository_path(page.file.src_uri)
    pages = {repository_path(file.src_uri): file.src_uri for file in files}
    lines, fenced = [], False
    markdown = MADE.sub(lambda match: made_tables()[match[1]](), markdown)
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


def sources_page() -> str:
    """Return what ``fuelrail sources KIND`` prints, of each kind, also of the plug-ins here.

    Options that a third of the kinds have alike are in one table.
    """
    kinds = [kind for kind in registry.sources() if kind.kind != "fuelrail"]
    known = {kind.kind for kind in kinds}
    for name, (folder, place) in plug_ins().items():
        if name not in known:
            sys.path.insert(0, str(folder))
            source = EntryPoint(name, place, registry.GROUP).load()
            sys.path.remove(str(folder))
            install = f"`pip install ./{folder.relative_to(ROOT)}` in a checkout"
            kinds.append(registry.describe_kind(source, name, install))
    counts = Counter(option for kind in kinds for option in kind.options)
    shared = [option for option, count in counts.items() if count > len(kinds) / 3]
    parts = [
        "# Kinds of sources\n",
        (
            "What `fuelrail sources KIND` prints. [Your own data](../sources.md) has manifests, "
            "and what kinds have in common.\n"
        ),
        "## Options of most kinds\n",
        options_table(shared),
    ]
    for kind in sorted(kinds, key=lambda kind: kind.kind):
        own = [option for option in kind.options if option not in shared]
        facts = [f"{name}: {fact}" for name, fact in kind.facts.items()]
        brought = [] if kind.package == "fuelrail" else [f"brought by {kind.package}"]
        parts += [f"## {kind.kind}\n", f"{kind.summary}\n", f"{kind.notes}\n"]
        parts += ["; ".join([*brought, *facts]) + ".\n"] if brought or facts else []
        parts += [options_table(own)] if own else []
    return "\n".join(parts)


def plug_ins() -> dict[str, tuple[Path, str]]:
    """Return the plug-ins of this repository: kind to folder, and to where the class is."""
    found = {}
    for project in sorted((ROOT / "configs" / "sources").glob("*/pyproject.toml")):
        stated = tomllib.loads(project.read_text(encoding="utf-8"))["project"]
        for name, place in stated.get("entry-points", {}).get(registry.GROUP, {}).items():
            found[name] = (project.parent, place)
    return found


def options_table(options: Sequence[SourceOption]) -> str:
    """Return a table of the options of a source."""
    rows = [
        f"| `{option.name}` | {option.type} | {option.default} | {option.description} |"
        for option in options
    ]
    return "\n".join(["| option | type | default | meaning |", "|---|---|---|---|", *rows, ""])


def made_tables() -> dict[str, Callable[[], str]]:
    """Return what makes each table that pages of the site have and those of the repository not."""
    return {
        "causes": causes_table,
        "limits": limits_table,
        "resume": resume_tables,
    }


def resume_tables() -> str:
    """Return the outcomes of all stacks, their versions, and what was not run."""
    file = ROOT / "bench" / "results" / "resume.json"
    return load_report_of(file, ResumeReport, resume.SCHEMA, resume.VERSION).as_text()


def causes_table() -> str:
    """Return what a watch advises, by cause."""
    rows = [f"| `{cause}` | {advice} |" for cause, advice in ADVICE.items()]
    return "\n".join(["| cause | what to do |", "|---|---|", *rows])


def limits_table() -> str:
    """Return the limits of what a reader holds."""
    rows = [f"| {limit.subject} | {limit.maximum:,} {limit.unit} |" for limit in LIMITS]
    return "\n".join(["| what | at most |", "|---|---|", *rows])


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


def public_groups() -> dict[str, Names]:
    """Return all public names, as programs write them, with their module and their name there: by
    hall, errors last.
    """
    package = ROOT / ".src" / "fuelrail"
    error_places = {
        f"fr.errors.{name}": (errors.__name__, name)
        for name, value in vars(errors).items()
        if issubclass_of_exception(value)
    }
    titles = {
        "loaders": "Loading",
        "pipeline": "Datasets, orders, augmentation",
        "sharding": "Making datasets",
        "bench": "Laboratory",
    }
    groups: dict[str, Names] = {title: {} for title in titles.values()}
    for name, place in read_public_names(package / "__init__.pyi").items():
        hall = place[0].removeprefix("fuelrail.").partition(".")[0]
        if hall in titles and name != "errors" and f"fr.errors.{name}" not in error_places:
            groups[titles[hall]][f"fr.{name}"] = place
    known = {place for group in groups.values() for place in group.values()}
    groups["Orders of your own rows"] = {
        f"fr.order.{name}": place
        for name, place in read_public_names(package / "order.py").items()
        if place not in known and f"fr.errors.{name}" not in error_places
    }
    groups["Laboratory"] |= {
        f"bench.{name}": place
        for name, place in read_public_names(package / "bench" / "__init__.pyi").items()
    }
    groups["Errors"] = error_places
    return groups


def python_page(groups: dict[str, Names]) -> str:
    """Return the reference of all public names."""
    parts = [
        "# Python\n",
        (
            "Every public name: `import fuelrail as fr`, then `fr.NAME`; those of the laboratory "
            "are `fuelrail.bench.NAME`, errors `fr.errors.NAME`, orders of your own rows "
            "`fr.order.NAME`. A name is imported when it is first used. [Names](names.md) has a "
            "line for each.\n"
        ),
    ]
    for title, places in groups.items():
        parts.append(f"## {title}\n")
        for name in sorted(places, key=str.lower):
            module, attribute = places[name]
            parts += reference_of(name.removeprefix("fr."), module, attribute)
    return "\n".join(parts)


def names_page(groups: dict[str, Names]) -> str:
    """Return the index of all public names: a table for each hall."""
    parts = [
        "# Names\n",
        "All public names, after `import fuelrail as fr` and `from fuelrail import bench`.\n",
    ]
    for title, places in groups.items():
        rows = [
            f"| [`{name}`](python.md#{anchor}) | {text.replace('|', '&#124;')} |"
            for name, anchor, text in described_names(places)
        ]
        parts.append("\n".join([f"## {title}\n", "| name | what it is |", "|---|---|", *rows, ""]))
    return "\n".join(parts)


def described_names(places: Names) -> Iterator[tuple[str, str, str]]:
    """Yield names, their anchors on the page of references, and the first sentence about them."""
    for name in sorted(places, key=str.lower):
        module, attribute = places[name]
        value = getattr(importlib.import_module(module), attribute)
        yield name, f"{module}.{attribute}", first_sentence(value.__doc__ or "")


def llms_text(config: MkDocsConfig, files: Files, groups: dict[str, Names]) -> str:
    """Return what the pages and the public names are, in a line each, for programs that read."""
    parts = [f"# {config.site_name}\n", f"> {config.site_description}\n"]
    sections = [entry for section in config.nav or () for entry in section.items()]
    for heading, pages in sections:
        parts.append(f"## {heading}\n")
        for title, uri in [entry for page in pages for entry in page.items()]:
            file = files.get_file_from_path(uri)
            assert file is not None, f"{uri} is in nav and nowhere else"
            parts.append(f"- [{title}]({file.url}): {first_sentence(file.content_string)}")
        parts.append("")
    for title, places in groups.items():
        parts.append(f"## Names: {title}\n")
        parts += [
            f"- [{name}](reference/python.html#{anchor}): {text}"
            for name, anchor, text in described_names(places)
        ]
        parts.append("")
    return "\n".join(parts)


def first_sentence(text: str) -> str:
    """Return the first sentence of the first paragraph of a page or docstring, without links."""
    prose = re.sub(r"^ *```.*?^ *```$", "", text, flags=re.MULTILINE | re.DOTALL)
    paragraphs = (part.strip() for part in re.split(r"\n\s*\n", prose))
    paragraph = next((part for part in paragraphs if PARAGRAPH.match(part)), "")
    plain = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", paragraph.replace("**", ""))
    plain = re.sub(r":\w+:(?=`)", "", plain).replace("``", "`").replace("`~", "`")
    sentence = SENTENCE.match(" ".join(plain.split()))
    return re.sub(r":$", ".", sentence[0]) if sentence else ""


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
