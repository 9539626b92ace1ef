"""Pages in an environment of their own: a reader's commands, with what the page says to install and nothing else.

`Environment` is that environment, made by pip. It starts this module as a program in it::

    python -m support.fresh_pages PAGE [HEADING...]

which runs the page's blocks in the current folder: Python in one namespace, each shell line in a shell of its own. The
figures behind a command, such as ``# 40 samples, 39 MB``, must be in what it prints, and so must be the lines below a
command of a ``console`` block.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CPU_TORCH = re.search(
    r"^CPU_TORCH \?= (\S+)$",
    (ROOT / "Makefile").read_text("utf-8"),
    re.MULTILINE,
)
FIGURE = re.compile(r"(\d[\d,]*(?:\.\d+)?) ([A-Za-z]\w*)")
OF_THIS_PACKAGE = re.compile(r"pip install (-e )?[\"']?(fuelrail|\.)(?=[\[\"'\s]|$)")
LINE_SECONDS = 600


class Environment:
    """A virtual environment; `install` adds what a page names, `install_torch` torch's CPU build."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.python = folder / "bin" / "python"
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)

    def install_torch(self) -> None:
        """Install torch's CPU build."""
        assert CPU_TORCH is not None
        self._pip(CPU_TORCH[1])

    def num_megabytes(self) -> float:
        """Return what the environment takes on the disk [MiB], as ``du -m`` counts it."""
        return sum(path.lstat().st_blocks * 512 for path in self.folder.rglob("*")) / 2**20

    def install(self, line: str) -> None:
        """Do a page's ``pip install``: the package is this checkout, whether the page says so or not."""
        words = shlex.split(line, comments=True)[2:]
        self._pip(*(re.sub(r"^(?:fuelrail|\.)(?=\[|$)", str(ROOT), word) for word in words))

    def read(self, page: Path, folder: Path, *headings: str) -> str:
        """Run the blocks of a page in a folder, all or those below some headings; return what they print."""
        return self.run(folder, self.python, "-m", "support.fresh_pages", page, *headings)

    def run(self, folder: Path, *command: str | Path) -> str:
        """Run a program in a folder; return what it prints."""
        variables = {
            **os.environ,
            "PATH": f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT / "tests"),
            "VIRTUAL_ENV": str(self.folder),
        }
        run = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True)
        words = " ".join(map(str, command))
        assert run.returncode == 0, f"{words}:\n{run.stdout[-2000:]}\n{run.stderr[-4000:]}"
        return run.stdout

    def _pip(self, *words: str) -> None:
        # Compiled are the modules that are imported.
        command = [self.python, "-m", "pip", "install", "--quiet", "--no-compile", *words]
        subprocess.run(command, check=True)


def installs_of(page: Path, *headings: str) -> list[str]:
    """Return the ``pip install`` lines of this package in a page's blocks, all or those below some headings."""
    from support.pages import blocks_of

    blocks = [block for block in blocks_of(page) if not headings or block.heading in headings]
    lines = [line.strip() for block in blocks for line in block.code.splitlines()]
    return [line for line in lines if OF_THIS_PACKAGE.match(line)]


def lacking_figures(comment: str, printed: str) -> list[str]:
    """Return the figures of ``comment``, numbers with their unit, that are not in what a command printed, rounded."""
    values: dict[str, list[float]] = {}
    for number, unit in FIGURE.findall(printed):
        values.setdefault(unit, []).append(float(number.replace(",", "")))
    lacking = []
    for number, unit in FIGURE.findall(comment):
        decimals = len(number.partition(".")[2])
        expected = float(number.replace(",", ""))
        if expected not in [round(value, decimals) for value in values.get(unit, [])]:
            lacking.append(f"{number} {unit}")
    return lacking


def run_line(line: str) -> str:
    """Run a line of a page in a shell, check the figures in its comment, and return what it prints."""
    command, _, comment = line.partition("  #")
    print(f"$ {command.strip()}", flush=True)
    run = subprocess.run(
        ["/bin/bash", "-c", command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LINE_SECONDS,
    )
    print(run.stdout, flush=True)
    assert run.returncode == 0, f"`{command.strip()}` ended with {run.returncode}"
    lacking = lacking_figures(comment, run.stdout)
    assert not lacking, f"`{command.strip()}` does not print {', '.join(lacking)}"
    return run.stdout


def run_console(code: str) -> None:
    """Run the commands of a console block, each behind ``$``, and find the lines below it in what it prints."""
    printed = ""
    for line in code.splitlines():
        if line.startswith("$ "):
            printed = " ".join(run_line(line[2:]).split())
        elif line.strip(" .") != "":
            assert " ".join(line.split()) in printed, f"the page shows {line!r}"


def main(page: str, *headings: str) -> None:
    """Run a page's blocks in the current folder."""
    from support import pages

    namespace = {"__name__": "page"}
    for block in pages.blocks_of(Path(page)):
        if headings and block.heading not in headings:
            continue
        if block.title is None and block.language == "console":
            run_console(block.code)
        elif block.title is None and block.language in ("sh", ""):
            for line in block.code.replace("\\\n", " ").splitlines():
                if line.strip() and not line.startswith(("pip install", "eval")):
                    run_line(line)
        else:
            pages.run(block, namespace, Path(page).name)


if __name__ == "__main__":
    main(*sys.argv[1:])
