"""Requests to `fuelrail browse`, and a layer whose values are drawn on images of 64x48 pixels."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlencode, urlsplit

import numpy as np

import fuelrail as fr

if TYPE_CHECKING:
    from email.message import Message
    from pathlib import Path

_IMAGE_OF = {"frame": "image:cam_front", "dtype": "float32"}


def ground_channel(rows: int, columns: int) -> dict[str, Any]:
    """The channel of a map of 40 by 30 m, from 10 m behind ego on, and from 15 m to its left."""
    return {
        "name": "ground",
        "kind": "array",
        "field": "ground.npy",
        "dtype": "uint8",
        "axes": ["x", "y"],
        "shape": [rows, columns],
        "frame": "ego",
        "law": {"name": "ego_grid", "extent_m": [-10.0, 15.0, 30.0, -15.0]},
    }


def drawn_channels(height: int, width: int) -> list[dict[str, Any]]:
    """The channels of a layer over images of this size: a raster, boxes and points, texts, a number."""
    depth = {
        "name": "depth",
        "kind": "array",
        "field": "depth.npy",
        "axes": ["height", "width"],
        "shape": [height, width],
        "law": {"name": "image", "camera": "cam_front", "fill": -1.0},
        **_IMAGE_OF,
    }
    marks = {
        "name": "marks",
        "kind": "points",
        "field": "marks.npy",
        "axes": ["row", "column"],
        "shape": [None, 6],
        "columns": ["left", "top", "right", "bottom", "u", "v"],
        "units": ["px"] * 6,
        "law": {
            "name": "image_points",
            "camera": "cam_front",
            "roles": {
                "boxes": [["left", "top", "right", "bottom"]],
                "points": [["u", "v"]],
            },
        },
        **_IMAGE_OF,
    }
    fixed = {"law": {"name": "fixed"}}
    return [
        depth,
        marks,
        {"name": "caption", "kind": "text", "field": "caption.txt", **fixed},
        {"name": "words", "kind": "texts", "field": "words.json", **fixed},
        {"name": "loss", "kind": "array", "field": "loss.npy", "dtype": "float32", **fixed},
    ]


def drawn_layer(base: Path, out: Path) -> Path:
    """A layer of the first five samples."""
    depth = np.full((48, 64), -1.0, np.float32)
    depth[20:30, 20:30] = 7.0
    marks = np.array([[30, 20, 50, 40, 10, 30]], np.float32)
    ground = np.zeros((4, 3), np.uint8)
    ground[3, 0] = 2  # 20 to 30 m ahead, 5 to 15 m to the left
    channels = [*drawn_channels(48, 64), ground_channel(4, 3)]
    with fr.LayerWriter(base, out, channels=channels) as writer:
        for row in range(5):
            values = {"depth": depth, "marks": marks, "ground": ground, "caption": f"row {row}"}
            words = ["a", f"row {row}"]
            writer.write(row, values | {"words": words, "loss": np.float32(row)})
    writer.finish(partial=True)
    return out


class Reply(NamedTuple):
    status: int
    body: bytes
    headers: Message


class Client:
    """Asks a server as a browser does that came by ``url``."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.host = urlsplit(url).netloc
        self.cookie = ""
        self.cookie = self.ask("/?" + urlsplit(url).query).headers["Set-Cookie"].partition(";")[0]

    def ask(self, target: str, headers: dict[str, str | None] | None = None) -> Reply:
        connection = http.client.HTTPConnection(self.host, timeout=60)
        with contextlib.closing(connection):
            connection.putrequest("GET", target, skip_host=True)
            sent = {"Host": self.host, "Cookie": self.cookie, **(headers or {})}
            for name, value in sent.items():
                if value is not None:
                    connection.putheader(name, value)
            connection.endheaders()
            response = connection.getresponse()
            return Reply(response.status, response.read(), response.headers)

    def get(
        self, path: str, headers: dict[str, str | None] | None = None, **query: Any
    ) -> tuple[int, bytes]:
        return self.ask(f"{path}?{urlencode(query)}" if query else path, headers)[:2]

    def json(self, path: str, **query: Any) -> Any:
        status, answer = self.get(path, **query)
        assert status == 200, answer
        return json.loads(answer)

    def send(self, text: str) -> bytes:
        """What answers a request of this text, up to the end of the connection."""
        host, _, port = self.host.partition(":")
        with socket.create_connection((host, int(port)), timeout=30) as connection:
            connection.sendall(f"{text}Connection: close\r\n\r\n".encode("latin-1"))
            parts = iter(lambda: connection.recv(1 << 16), b"")
            return b"".join(parts)
