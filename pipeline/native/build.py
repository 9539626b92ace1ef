"""Compiles the native library of this folder: ``python -m fuelrail.pipeline.native``.

Installing does the same (.ci/hatch_build.py), where it can. Only the standard library is used, so
that a build backend can load this file by its path. Needs GCC 12 or Clang 12, or newer; no library.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
import tempfile
import zlib
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
LIBRARY_NAME = "libcamera_jpeg.so"
_FLAGS = ("-O3", "-std=gnu11", "-fwrapv", "-fPIC", "-shared", "-Wno-psabi")
_LEVELS = {"x86_64": ("-march=x86-64-v3",), "aarch64": ()}
"""Processors by name to the flags of their vector code: AVX2 and BMI2, of 2013; NEON, which every
aarch64 has and which the compiler makes of the portable code. Others use libjpeg-turbo: without
vector code, this is slower.
"""


class BuildError(Exception):
    """There is no compiler, or it failed; says what to do."""


def source_crc(folder: Path = FOLDER) -> int:
    """Return CRC-32 of all sources, which a library must have been built from to be used."""
    crc = 0
    for file in sorted(folder.glob("*.[ch]")):
        crc = zlib.crc32(file.read_bytes(), crc)
    return crc


def build(folder: Path = FOLDER, flags: tuple[str, ...] | None = None) -> Path:
    """Compile the sources of ``folder`` into a library beside them, and return its path.

    Raises BuildError.
    """
    compiler = os.environ.get("CC") or next(filter(shutil.which, ("cc", "gcc", "clang")), None)
    if compiler is None:
        raise BuildError("no C compiler: install one (Debian package gcc)")
    if flags is None:
        # Of the Python that this is for: a cross build says so in _PYTHON_HOST_PLATFORM.
        processor = sysconfig.get_platform().rpartition("-")[2]
        flags = _LEVELS.get(processor)
        if flags is None:
            raise BuildError(f"there is no vector code for processors of kind {processor!r}")
    library = folder / LIBRARY_NAME
    with tempfile.TemporaryDirectory(dir=folder, prefix=".build-") as scratch:
        new_library = Path(scratch) / LIBRARY_NAME
        command = [
            *compiler.split(),
            *_FLAGS,
            *flags,
            f"-DSOURCE_CRC={source_crc(folder)}u",
            "add_restarts.c",
            "camera_jpeg.c",
            "restart_rows.c",
        ]
        done = subprocess.run(
            [*command, "-o", str(new_library), "-lm"],
            cwd=folder,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
        if done.returncode != 0:
            first = next(
                (line for line in done.stderr.splitlines() if "error" in line),
                done.stderr[:200],
            )
            raise BuildError(
                f"the C compiler {compiler!r} failed, GCC 12 or Clang 12 are needed: "
                f"{first.strip()}"
            )
        new_library.replace(library)
    return library
