"""The loaders that are compared: where each one's module is, what it needs, and its ways to decode.

A contestant is named ``PEER:RECIPE``, with ``+toppad`` behind it where glibc's malloc is told to keep freed memory: its
default gives the megabytes of every decoded picture back to the kernel, and fresh pages cost up to half of decoding.
``+again`` is the same once more: by how much the reference differs from itself is the comparison's own error.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, NamedTuple

from fuelrail.bench.peers.interface import UnavailableError
from fuelrail.pipeline.errors import ConfigError

if TYPE_CHECKING:
    from fuelrail.bench.peers.interface import Peer

OURS = "fuelrail"
TOPPAD = "toppad"
MALLOC = {
    "MALLOC_TOP_PAD_": "268435456",
    "MALLOC_MMAP_THRESHOLD_": "4294967296",
    "MALLOC_TRIM_THRESHOLD_": "4294967296",
}


class Entry(NamedTuple):
    """One peer: its module, what must be importable, how to get it, distributions to tell versions of, and recipes.

    ``data``: what its folder is written by, if that is not the peer itself.
    """

    module: str
    needs: tuple[str, ...]
    install: str
    packages: tuple[str, ...]
    recipes: tuple[str, ...]
    data: str | None = None


PEERS: dict[str, Entry] = {
    OURS: Entry("fuelrail", (), "", (), ("pillow", "restart", "turbo+again", "turbo")),
    "loose": Entry("loose", ("PIL",), "pip install pillow", ("torch",), ("pil", "pilfast", "cv2", "cv2fast", "sjfast")),
    "wds": Entry(
        "wds", ("webdataset",), "pip install webdataset", ("webdataset",), ("pil", "cv2", "cv2fast", "sjfast")
    ),
    "mds": Entry(
        "mds", ("streaming",), "pip install mosaicml-streaming", ("mosaicml-streaming",), ("cv2", "cv2fast", "sjfast")
    ),
    "lit": Entry("lit", ("litdata",), "pip install litdata", ("litdata",), ("cv2", "cv2fast", "sjfast")),
    "spdl": Entry(
        "spdl", ("spdl.pipeline",), "pip install spdl-core", ("spdl-core",), ("cv2", "cv2fast", "sjfast"), "wds"
    ),
    "spdl-io": Entry(
        "spdl_io", ("spdl.pipeline", "spdl.io"), "pip install spdl spdl-io, and FFmpeg's shared libraries",
        ("spdl-io",), ("ffmpeg",), "wds",
    ),
    "energon": Entry(
        "energon", ("megatron.energon",), "pip install megatron-energon", ("megatron-energon",),
        ("cv2", "cv2fast", "sjfast"),
    ),
    "grain": Entry(
        "grain", ("grain", "array_record"), "pip install grain array-record", ("grain", "array-record"),
        ("thr-cv2", "thr-cv2fast", "thr-cv2fast+toppad", "thr-sjfast"),
    ),
    "dali": Entry(
        "dali", ("nvidia.dali",), "pip install nvidia-dali-cuda120", ("nvidia-dali-cuda120",), ("roi", "noaa"), "wds"
    ),
    "ffcv": Entry("ffcv", ("ffcv",), "pip install ffcv (built against OpenCV and libjpeg-turbo)", ("ffcv",), ("area",)),
}  # fmt: skip


class Contestant(NamedTuple):
    """A peer with one of its recipes."""

    peer: str
    recipe: str

    @property
    def name(self) -> str:
        """As reports and the command line name it."""
        return f"{self.peer}:{self.recipe}"

    @property
    def decoding(self) -> str:
        """The recipe without its settings."""
        return self.recipe.partition("+")[0]

    @property
    def environment(self) -> dict[str, str]:
        """What its process needs in its environment."""
        return MALLOC if self.recipe.endswith(f"+{TOPPAD}") else {}


def contestants(only: tuple[str, ...] = ()) -> list[Contestant]:
    """All of them, or those named by peer or as ``PEER:RECIPE``; ours come along. Raises ConfigError."""
    every = [Contestant(peer, recipe) for peer, entry in PEERS.items() for recipe in entry.recipes]
    if not only:
        return every
    for name in only:
        if name not in PEERS and name not in {contestant.name for contestant in every}:
            known = "; ".join(f"{peer}: {', '.join(entry.recipes)}" for peer, entry in PEERS.items())
            raise ConfigError(f"--only {name!r} is no loader and no LOADER:RECIPE; there are {known}")
    ours_named = any(name.partition(":")[0] == OURS for name in only)
    wanted = set(only) if ours_named else {*only, OURS}
    return [contestant for contestant in every if contestant.peer in wanted or contestant.name in wanted]


def is_there(name: str) -> str | None:
    """Why a peer cannot be had, without importing anything that is large; None if it seems to be there."""
    entry = PEERS[name]
    for module in entry.needs:
        # Submodules would import their parents; the process that runs the peer finds out about those.
        if importlib.util.find_spec(module.partition(".")[0]) is None:
            return f"'{module}' is not installed: {entry.install}"
    return None


def load_peer(name: str) -> Peer:
    """Import a peer; raises UnavailableError, saying what to install, where it is not there."""
    entry = PEERS[name]
    for module in entry.needs:
        try:
            found = importlib.util.find_spec(module) is not None
            if found:
                importlib.import_module(module)
        # A library without its shared libraries fails in its own way, and not always with ImportError.
        except Exception as error:
            reason = str(error).partition("\n")[0]
            raise UnavailableError(f"{name}: '{module}' cannot be imported ({reason}): {entry.install}") from error
        if not found:
            raise UnavailableError(f"{name}: '{module}' is not installed: {entry.install}")
    peer: Peer = importlib.import_module(f"fuelrail.bench.peers.{entry.module}").PEER
    return peer
