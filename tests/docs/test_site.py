"""The site builds without a warning, has the pages that are elsewhere, and needs no network to be read."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from html import unescape

import pytest

from fuelrail import __main__ as command_line
from fuelrail.pipeline.face import read_public_names
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
            r"<link[^>]+rel=\"(?:stylesheet|preload|preconnect)\"[^>]+href=\"([^\"]+)\"", text
        )
        assert not [link for link in loaded if "//" in link], page.name
        for link in re.findall(r"<a [^>]*href=\"([^\"#]+)", text):
            if "://" not in link and not link.startswith("mailto:") and page.name != "404.html":
                assert (page.parent / unescape(link)).exists(), f"{page.relative_to(site)}: {link}"


def test_references_name_everything(site) -> None:
    python = (site / "reference" / "python.html").read_text(encoding="utf-8")
    package = ROOT / ".src" / "fuelrail"
    names = read_public_names(package / "__init__.pyi").keys() - {"bench", "errors", "order"}
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
            ["chromium", *options, address], capture_output=True, text=True, check=True, timeout=120
        )
        assert re.search(
            r'<a href="file://[^"]*/training.html[^"]*" class="md-search-result__link"', done.stdout
        )
