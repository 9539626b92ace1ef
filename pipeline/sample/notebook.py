"""What a notebook shows of a dataset: its sizes, and thumbnails of a sample's cameras."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Mapping
from html import escape
from typing import Final

import numpy as np

from fuelrail.pipeline.errors import FuelrailError, ImageError, needs
from fuelrail.pipeline.sample.image_header import probe

_WIDTH: Final = 200
"""The width of a thumbnail [px]."""


def thumbnail(encoded: bytes, width: int = _WIDTH) -> bytes:
    """Make a JPEG ``width`` pixels wide of an encoded image; raise ImageError where it cannot be
    decoded.
    """
    with needs("a thumbnail"):
        import cv2

    info = probe(encoded)
    image = cv2.imdecode(np.frombuffer(encoded, np.uint8), cv2.IMREAD_COLOR)
    if image is None:
        raise ImageError(
            "the image cannot be decoded; check the dataset with `fuelrail verify --deep`"
        )
    height = max(round(info.height * width / info.width), 1)
    return cv2.imencode(".jpg", cv2.resize(image, (width, height), interpolation=cv2.INTER_AREA))[
        1
    ].tobytes()


def dataset_html(
    title: str,
    splits: Iterable[tuple[str, int, int, int]],
    read_images: Callable[[], Mapping[str, bytes]],
) -> str:
    """Return a table of splits (name, samples, clips, shards), and the images, or what is wrong
    with them.
    """
    rows = "".join(
        f"<tr><td>{escape(name)}</td>"
        + "".join(f"<td>{number:,}</td>" for number in numbers)
        + "</tr>"
        for name, *numbers in splits
    )
    figures = []
    try:
        for channel, encoded in read_images().items():
            data = base64.b64encode(thumbnail(encoded)).decode()
            figures.append(
                '<figure style="display:inline-block;margin:2px"><img '
                f'src="data:image/jpeg;base64,{data}">'
                f"<figcaption>{escape(channel)}</figcaption></figure>"
            )
    except FuelrailError as error:
        figures.append(f"<p>sample 0 cannot be shown: {escape(str(error))}</p>")
    head = "<tr><th>split</th><th>samples</th><th>clips</th><th>shards</th></tr>"
    return f"<div><p>{escape(title)}</p><table>{head}{rows}</table>{''.join(figures)}</div>"
