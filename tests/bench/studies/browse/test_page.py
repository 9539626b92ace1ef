"""The page of `fuelrail browse` in Chromium: what it draws, its keys, its links, and hostile names."""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import threading
from functools import partial
from typing import TYPE_CHECKING

import cv2
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import fuelrail as fr
from fuelrail import bench
from fuelrail.bench.micro.chromium import CHROMIUM, open_page
from fuelrail.loaders.viewer import drawing
from fuelrail.pipeline.format.dataset import open_dataset
from fuelrail.pipeline.sample.schema import Boxes, decode_arrays, encode_arrays
from support.browsing import drawn_channels, drawn_layer
from support.fault_server import FaultServer, Misbehaviour
from support.hostile import edited, small_dataset

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.network,
    pytest.mark.process,
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed here"),
]

IS_SHOWN = """
document.querySelectorAll('#cameras .picture img').length > 0
&& [...document.querySelectorAll('#cameras img')].every((image) => image.complete && image.naturalWidth)
&& document.querySelectorAll('.tile').length > 0
&& document.querySelector('#when').textContent !== ''
"""
# The ends of each line that is drawn on a camera, in pixels of its image whose centres are whole numbers.
LINES = """
[...document.querySelectorAll('#cameras .pair')].map((pair) => {
  const image = pair.querySelector('img');
  const place = image.getBoundingClientRect();
  return [...pair.querySelectorAll('svg g > path')].flatMap((path) => {
    const matrix = path.getScreenCTM();
    return path.getAttribute('d').match(/[^ML]+/g).map((text) => {
      const [u, v] = text.trim().split(' ').map(Number);
      const point = new DOMPoint(u, v).matrixTransform(matrix);
      return [(point.x - place.x) / place.width * image.naturalWidth - 0.5,
              (point.y - place.y) / place.height * image.naturalHeight - 0.5];
    });
  });
})
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return small_dataset(tmp_path_factory.mktemp("browsed") / "d")


@pytest.fixture(scope="module")
def browser(root, tmp_path_factory):
    place = tmp_path_factory.mktemp("beside")
    drawn_layer(root, place / "seen")
    (place / "own.yaml").write_text("height: 48\nwidth: 64\n")
    (place / "night.yaml").write_text("kind: shuffled\nseed: 3\nfilter: night\n")
    options = {"layers": {"seen": str(place / "seen")}, "order": (str(place / "night.yaml"),)}
    with bench.browse(root, **options, image=str(place / "own.yaml")) as browser:
        yield browser


@pytest.fixture
def page(browser, tmp_path):
    with open_page(f"{browser.url}#row=3", tmp_path / "profile") as page:
        page.wait(IS_SHOWN)
        yield page
        assert page.complaints == []


def test_boxes_are_where_view_draws_them(page, root, monkeypatch):
    """Within 0.1 pixels of the stored image, every line in the same order."""
    drawn: list[list[np.ndarray]] = []
    tiles: list[int] = []
    line = cv2.line

    def record(tile, start, end, *args, **options):
        if options.get("shift") == 4:
            if id(tile) not in tiles:
                tiles.append(id(tile))
                drawn.append([])
            drawn[-1] += [np.array(start) / 16, np.array(end) / 16]
        return line(tile, start, end, *args, **options)

    monkeypatch.setattr(drawing.cv2, "line", record)
    report = fr.view(root, "clip-0000-000003")
    assert report.num_boxes == 3
    shown = [camera for camera in page.run(LINES) if camera]
    assert len(shown) == len(drawn) > 0
    for ours, theirs in zip(shown, drawn, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=0.1)
        assert np.abs(np.array(ours) - theirs).max() < 0.1


# Which boxes' edges are under the middle of the first edge of box 1, and whether it is seen through hidden classes.
EDGES = """
(() => {
  const path = document.querySelector('#cameras .pair[data-camera=cam_front] g[data-box="1"] > path');
  const [[u, v], [right, bottom]] = path.getAttribute('d').match(/[^ML]+/g).slice(0, 2)
    .map((text) => text.trim().split(' ').map(Number));
  const point = new DOMPoint((u + right) / 2, (v + bottom) / 2).matrixTransform(path.getScreenCTM());
  return document.elementsFromPoint(point.x, point.y)
    .map((element) => element.parentNode.dataset?.box).filter((box) => box !== undefined);
})()
"""


IN_A_ROW = [[12, 0, 0, 2, 6, 5, 0], [25, 0, 0, 2, 2, 2, 0], [-20, 0, 0, 2, 2, 2, 0]]


def test_a_nearer_box_hides_what_is_behind_it(root, tmp_path):
    """Not once its class is hidden."""
    with edited(root, tmp_path / "d") as parts:
        member = parts.samples[3].members["boxes.safetensors"]
        boxes = decode_arrays(member.raw, Boxes)
        boxes3d = np.array(IN_A_ROW, np.float32)
        label = np.array([0, 1, 1], np.int16)
        member.raw = encode_arrays(dataclasses.replace(boxes, boxes3d=boxes3d, label=label))
    with (
        bench.browse(tmp_path / "d") as browser,
        open_page(f"{browser.url}#row=3", tmp_path / "profile") as page,
    ):
        page.wait(IS_SHOWN)
        assert page.run(EDGES) == []
        page.run("document.querySelector('#classes input').click()")
        assert page.run(EDGES) == ["1"]
        assert page.complaints == []


def test_boxes_are_hidden_by_key_and_by_class(page):
    count = "[...document.querySelectorAll('#cameras svg g[data-label]')].filter((g) => !g.matches('.is-off')).length"
    all_boxes = page.run(count)
    assert all_boxes > 0
    page.run("document.querySelector('#classes input').click()")
    assert 0 <= page.run(count) < all_boxes
    page.press("b")
    assert page.run(count) == 0
    page.press("b")
    page.run("document.querySelector('#classes input').click()")
    assert page.run(count) == all_boxes


def test_arrows_step_through_the_clip(page):
    page.press("ArrowLeft")
    page.wait("document.querySelector('#key').textContent === 'clip-0000-000002'")
    page.wait("document.querySelector('#when').textContent.includes('frame 3 of 4')")
    page.press("ArrowRight")
    page.wait("document.querySelector('#key').textContent === 'clip-0000-000003'")
    page.press("]")
    page.wait("document.querySelector('#key').textContent === 'clip-0001-000000'")


def test_a_link_opens_the_same_view(page, browser, tmp_path):
    page.run("document.querySelector('#filter').value = 'night'")
    page.run("document.querySelector('#search').requestSubmit()")
    page.wait("document.querySelectorAll('.tile').length === 4")
    page.press("2")
    page.press("b")
    view = "document.querySelector('main').innerText + document.querySelector('#cameras').className"
    page.wait(IS_SHOWN)
    shown = page.run(view)
    assert "is-one" in shown
    fragment = page.run("location.hash")
    with open_page(browser.url + fragment, tmp_path / "other") as other:
        other.wait(IS_SHOWN)
        other.wait("document.querySelectorAll('.tile').length === 4")
        other.wait("document.querySelector('#attributes tbody tr') !== null")
        other.wait("document.querySelector('#when').textContent !== ''")
        assert other.run(view) == shown
        assert other.complaints == []


def test_channels_of_a_layer_are_drawn(page):
    page.run(
        "[...document.querySelectorAll('#drawn input')].forEach((input, n) => "
        "document.querySelectorAll('#drawn input')[n].click())"
    )
    page.wait("document.querySelectorAll('#cameras svg rect').length === 1")
    page.wait("document.querySelector('img.raster')?.naturalWidth === 64")
    sides = "['x', 'y', 'width', 'height'].map((name) => Number(image.getAttribute(name)))"
    image = "document.querySelector('#above image')"
    assert page.run(f"((image) => {sides})({image})") == [-15, -30, 30, 40]


def test_a_sample_is_shown_as_loaded_beside_the_stored_one(page):
    page.press("a")
    page.wait("document.querySelectorAll('.as-loaded img').length === 2")
    page.wait(IS_SHOWN)
    assert page.run("document.querySelector('.as-loaded img').naturalWidth") == 64


def test_steps_of_an_order_are_thumbnails(page):
    page.run(
        "[...document.querySelectorAll('#kinds button')].find((b) => b.textContent === 'Order').click()"
    )
    page.wait("document.querySelector('#count').textContent === 'epoch 0, step 0 of 1'")
    assert page.run("document.querySelectorAll('.tile').length") == 4


def test_a_wrong_filter_is_told(page):
    page.run("document.querySelector('#filter').value = 'day > 2'")
    page.run("document.querySelector('#search').requestSubmit()")
    page.wait("document.querySelector('#fault').textContent.includes(\"no attribute 'day'\")")
    page.complaints[:] = [text for text in page.complaints if "status of 422" not in text]


def test_everything_that_takes_input_has_a_name(page):
    """As Chromium tells accessibility tools; a narrow window scrolls in one direction only."""
    nodes = page.call("Accessibility.getFullAXTree")["nodes"]
    roles = {"button", "checkbox", "combobox", "textbox", "slider", "spinbutton", "image", "img"}
    seen = set()
    for node in nodes:
        role = node.get("role", {}).get("value")
        if role in roles and not node.get("ignored"):
            seen.add(role)
            assert node["name"]["value"], node
    assert {"button", "checkbox", "slider"} <= seen
    page.resize(320, 640)
    assert page.run("document.documentElement.scrollWidth") <= 320


FOCUSED = "document.activeElement.id || document.activeElement.className"


def test_the_keyboard_reaches_everything_in_the_order_in_which_it_is_seen(page):
    reached = []
    for _ in range(60):
        page.press("Tab")
        focused = page.run(FOCUSED)
        if focused == "skip" and reached:
            break
        reached.append(focused)
    for first, second in itertools.pairwise(
        [
            "skip",
            "split",
            "filter",
            "help-button",
            "tile",
            "link",
            "frames",
            "has-boxes",
            "loaded",
            "place",
        ]
    ):
        assert reached.index(first) < reached.index(second)
    page.run("document.querySelector('#skip').focus()")
    page.press("Enter")
    page.wait("document.activeElement.id === 'key'")
    scrolls = (
        "[...document.querySelectorAll('main *')].filter((e) => e.scrollHeight > e.clientHeight + 1"
    )
    scrolls += " && getComputedStyle(e).overflowY === 'auto' && e.matches('.card'))"
    assert page.run(f"{scrolls}.every((element) => element.tabIndex === 0)")
    assert page.run(
        "[...document.querySelector('#tiles').children].every((e) => e.tagName === 'LI')"
    )


def test_bytes_of_a_remote_sample_are_told_while_it_loads(root, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    come = threading.Event()

    def wait(request):
        is_sample = request.name.endswith(".tar") and request.number > 0
        return Misbehaviour(status=None if come.is_set() else 503) if is_sample else Misbehaviour()

    with (
        FaultServer(root, wait) as server,
        bench.browse(server.url) as browser,
        open_page(f"{browser.url}#row=3", tmp_path / "profile") as page,
    ):
        length = open_dataset(root).index.row(3).length
        page.wait(
            f"document.querySelector('#busy-bytes')?.textContent.endsWith('of {length / 1000:.1f} kB')"
        )
        assert page.run("document.querySelector('#busy-text').textContent").startswith(
            "Loading sample 3"
        )
        come.set()
        page.wait(IS_SHOWN)
        assert page.run("document.querySelector('#busy').hidden")


HOSTILE = (
    "<img src=x onerror='alert(1)'></script><script>alert(2)</script>\x1b\u202e\"&'`${alert(3)}"
)


def edited_night(file: bytes, *, is_value: bool) -> bytes:
    """The attributes with the column ``night`` renamed, or with other values."""
    table = pq.read_table(io.BytesIO(file))
    place = table.schema.get_field_index("night")
    if is_value:
        table = table.set_column(place, "night", pa.array([HOSTILE] * len(table)))
    else:
        names = [HOSTILE if name == "night" else name for name in table.schema.names]
        table = table.rename_columns(names)
    out = io.BytesIO()
    pq.write_table(table, out)
    return out.getvalue()


def hostile_layer(base: Path, out: Path) -> Path:
    """A layer whose texts are hostile."""
    texts = [channel for channel in drawn_channels(48, 64) if channel["kind"].startswith("text")]
    with fr.LayerWriter(base, out, channels=texts) as writer:
        for row in range(8):
            writer.write(row, {"caption": HOSTILE, "words": [HOSTILE, HOSTILE]})
    writer.finish()
    return out


@pytest.mark.parametrize("place", ["names", "keys", "meta", "columns", "values", "texts"])
def test_hostile_names_are_text(place, root, tmp_path):
    with edited(root, tmp_path / "d") as parts:
        if place == "names":
            parts.manifest["name"] = HOSTILE
            parts.manifest["classes"] = [HOSTILE, "pedestrian"]
        for number, sample in enumerate(parts.samples):
            meta = sample.members["meta.json"]
            if place == "meta":
                fields = json.loads(meta.raw) | {"clip_name": HOSTILE}
                meta.raw = json.dumps(fields).encode()
            if place == "keys":
                sample.key = f"k{number}<b onclick=alert(1)>"
        if place in ("columns", "values"):
            edit = partial(edited_night, is_value=place == "values")
            parts.edit_files["attributes.parquet"] = edit
    layers = None
    if place == "texts":
        layers = {"t": str(hostile_layer(tmp_path / "d", tmp_path / "layer"))}
    with (
        bench.browse(tmp_path / "d", layers=layers) as browser,
        open_page(f"{browser.url}#row=3&columns=night", tmp_path / "profile") as page,
    ):
        page.wait("document.querySelectorAll('.tile').length > 0")
        page.wait("document.querySelector('#place') !== null")
        word = "onclick" if place == "keys" else "onerror"
        page.wait(f"document.documentElement.textContent.includes('{word}')")
        assert page.run("document.querySelectorAll('script, [onerror], [onclick]').length") == 1
        assert not [text for text in page.complaints if "status of 4" not in text]
