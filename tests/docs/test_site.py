"""The site builds without a warning, has the pages that are elsewhere, and needs no network to be read."""

from __future__ import annotations

import re
import runpy
import shutil
import subprocess
import sys
from html import unescape

import pytest

import fuelrail as fr
from fuelrail import __main__ as command_line
from fuelrail.bench.studies.watch.judge import ADVICE
from fuelrail.loaders.records import batch_entries
from fuelrail.pipeline.face import read_public_names
from fuelrail.pipeline.limits import LIMITS
from support.pages import ROOT

pytest.importorskip("mkdocs", reason="the extra docs is not installed here")
pytest.importorskip("material", reason="the extra docs is not installed here")

pytestmark = [pytest.mark.slow, pytest.mark.process]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    out = tmp_path_factory.mktemp("site")
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--quiet",
        "--site-dir",
        str(out),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return out


def test_every_page_is_whole(site) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 25
    for page in pages:
        text = page.read_text(encoding="utf-8")
        loaded = re.findall(r"<(?:script|img|source)[^>]+src=\"([^\"]+)\"", text)
        loaded += re.findall(
            r"<link[^>]+rel=\"(?:stylesheet|preload|preconnect)\"[^>]+href=\"([^\"]+)\"",
            text,
        )
        assert not [link for link in loaded if "//" in link], page.name
        for link in re.findall(r"<a [^>]*href=\"([^\"#]+)", text):
            if "://" not in link and not link.startswith("mailto:") and page.name != "404.html":
                assert (page.parent / unescape(link)).exists(), f"{page.relative_to(site)}: {link}"


def test_references_name_everything(site) -> None:
    python = (site / "reference" / "python.html").read_text(encoding="utf-8")
    package = ROOT / ".src" / "fuelrail"
    names = read_public_names(package / "__init__.pyi").keys() - {
        "bench",
        "errors",
        "order",
    }
    names |= read_public_names(package / "bench" / "__init__.pyi").keys()
    assert not [
        name
        for name in sorted(names)
        if not re.search(rf"<h3[^>]*>.*?\b{name}\b", python, re.DOTALL)
    ]
    for method in ("describe", "show", "state_dict"):
        assert f'id="fuelrail.loaders.loader.DataLoader.{method}"' in python
    commands = (site / "reference" / "commands.html").read_text(encoding="utf-8")
    assert not [
        word for word in command_line._COMMANDS if f"usage: fuelrail {word}" not in commands
    ]
    assert "usage: fuelrail bench train" in commands
    assert "--ray-address" in commands


def test_pages_have_the_tables_that_are_made(site) -> None:
    def words_of(page: str) -> str:
        text = (site / f"{page}.html").read_text(encoding="utf-8")
        return " ".join(unescape(re.sub(r"<[^>]+>", " ", text)).split())

    loader = words_of("loader")
    assert not [name for name in batch_entries() if name not in loader]
    assert "lightning-stateful exact exact exact crashes loses 96" in words_of("bench/RESULTS")
    assert "plain 2 slow storage storage, data wait INPUT_BOUND" in words_of("bench/RESULTS")
    occupancy = words_of("occupancy")
    assert not [advice for advice in ADVICE.values() if advice not in occupancy]
    sizes = words_of("guarantees")
    assert not [limit for limit in LIMITS if f" {limit.maximum:,} {limit.unit}" not in sizes]
    kinds = words_of("reference/sources")
    plug_ins = {"arrow", "pandaset", "physical_ai", "py123d"}
    known = {kind.kind for kind in fr.sources() if kind.package == "fuelrail"} - {"fuelrail"}
    for name in known | plug_ins:
        assert re.search(rf"\b{name} ¶", kinds), name
    assert "stereo true or false false true takes the two stereo cameras too" in kinds


def test_llms_txt_has_a_line_for_each_page_and_each_public_name(site) -> None:
    text = (site / "llms.txt").read_text(encoding="utf-8")
    lines = re.findall(r"^- \[(.+?)\]\((.+?)\): (.+)$", text, re.MULTILINE)
    assert len(lines) == text.count("\n- ")
    said = {name: (target, sentence) for name, target, sentence in lines}
    assert said["Layers"][1].startswith("A layer adds channels to the samples of a dataset")
    nav = re.findall(
        r"^ +- (.+): (\S+)\.md$",
        (ROOT / "mkdocs.yml").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    assert len(nav) > 25
    for title, path in nav:
        assert said[title][0] == f"{re.sub('README$', 'index', path)}.html"
        assert (site / said[title][0]).is_file()
    python = (site / "reference" / "python.html").read_text(encoding="utf-8")
    names = {name: place for name, place in said.items() if "python.html#" in place[0]}
    assert not [
        name for name, place in names.items() if f'id="{place[0].partition("#")[2]}"' not in python
    ]
    package = ROOT / ".src" / "fuelrail"
    faces = (("fr", "__init__.pyi"), ("bench", "bench/__init__.pyi"))
    public = {
        f"{face}.{name}" for face, stub in faces for name in read_public_names(package / stub)
    }
    public -= {"fr.bench", "fr.errors", "fr.order", "fr.FuelrailError"}
    assert names.keys() >= public | {
        "fr.order.BatchSampler",
        "fr.errors.FuelrailError",
    }
    assert names["fr.DataLoader"][1] in " ".join(fr.DataLoader.__doc__.split())
    index = (site / "reference" / "names.html").read_text(encoding="utf-8")
    assert not [name for name in names if f"<code>{name}</code>" not in index]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "# A\n\n![b](b.svg)\n\n**Read [this](x.md).** Then that.",
            "Read this.",
        ),
        (
            "# A\n\n```sh\nrun it. Now\n```\n\nUse `a.b`, then `c`. Go.",
            "Use `a.b`, then `c`.",
        ),
        (
            "# A\n\n1. one\n2. two\n\n| a |\n|---|\n\nChoose\none:\n",
            "Choose one.",
        ),
        ("A ``name`` of :class:`~a.B`.\n\nMore.", "A `name` of `a.B`."),
        ("# A\n", ""),
    ],
    ids=["picture", "code", "list", "docstring", "nothing"],
)
def test_first_sentence_of(text, sentence) -> None:
    page_hook = runpy.run_path(str(ROOT / "docs" / "assets" / "site.py"))
    assert page_hook["first_sentence"](text) == sentence


def test_the_formats_page_is_the_specification(site) -> None:
    page = (site / "pipeline" / "format" / "FORMAT.html").read_text(encoding="utf-8")
    assert "blocks.sha256" in page


@pytest.mark.skipif(shutil.which("chromium") is None, reason="chromium is not installed")
def test_search_works_from_files(site) -> None:
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--virtual-time-budget=20000",
        "--dump-dom",
    ]
    for page in ("index.html", "guides/quickstart.html"):
        address = f"{(site / page).as_uri()}?q=occupancy"
        done = subprocess.run(
            ["chromium", *options, address],
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        )
        assert re.search(
            r'<a href="file://[^"]*/training.html[^"]*" class="md-search-result__link"',
            done.stdout,
        )
