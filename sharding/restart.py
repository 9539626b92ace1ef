"""JPEGs rewritten with a restart marker at each row of MCUs: the same coefficients, and rows can be cut out of them.

A loader whose crop drops the top third splices header and needed rows into a smaller JPEG before it decodes anything.
The rewriting is libjpeg-turbo's own program ``jpegtran``: it decodes no pixel and loses nothing. Its Huffman tables are
made to measure (``-optimize``), which saves more bytes than the markers cost.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from typing import TYPE_CHECKING

from fuelrail.pipeline.errors import ConfigError, ImageError

if TYPE_CHECKING:
    from fuelrail.pipeline.buffers import Buffer

_PROGRAM = "jpegtran"
_TIMEOUT_S = 60.0


def jpegtran_version() -> str:
    """The program's version, of which the bytes of rewritten JPEGs may depend; raises ConfigError without it."""
    if shutil.which(_PROGRAM) is None:
        raise ConfigError(
            f"jpeg=restart needs the program {_PROGRAM}, which is not installed: "
            "Debian and Ubuntu have it in libjpeg-turbo-progs"
        )
    try:
        shown = subprocess.run([_PROGRAM, "-version"], input=b"", capture_output=True, check=False, timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"jpeg=restart: {_PROGRAM} -version has not answered in {_TIMEOUT_S:.0f} s") from error
    match = re.search(r"libjpeg-turbo version [0-9.]+", (shown.stdout + shown.stderr).decode(errors="replace"))
    if match is None:
        raise ConfigError(f"jpeg=restart needs the {_PROGRAM} of libjpeg-turbo; the one installed is another")
    return match.group()


def with_restart_rows(data: Buffer) -> bytes:
    """The JPEG, baseline, with restart markers at its rows of MCUs; metadata kept. Raises ImageError if broken."""
    command = [_PROGRAM, "-restart", "1", "-optimize", "-copy", "all"]
    try:
        done = subprocess.run(command, input=data, capture_output=True, check=False, timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise ImageError(
            f"{_PROGRAM} has not rewritten its {len(data)} bytes in {_TIMEOUT_S:.0f} s; it was stopped"
        ) from error
    if done.returncode != 0 or not done.stdout:
        reason = done.stderr.decode(errors="replace").strip() or f"exit code {done.returncode}"
        raise ImageError(f"{_PROGRAM} cannot rewrite it: {reason}")
    return done.stdout
