"""What `fuelrail browse` answers: samples, lists, steps; and what it refuses."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest
import simplejpeg

import fuelrail as fr
from fuelrail import bench
from fuelrail.pipeline.format import fetch
from fuelrail.pipeline.format.dataset import open_dataset
from fuelrail.pipeline.order.batching import Cursor
from support.batches import load
from support.browsing import Client, drawn_layer, ground_channel
from support.fault_server import FaultServer
from support.hostile import edited, small_dataset, small_layer
from support.hostile_cases import cases
from support.hostile_layers import cases as layer_cases

pytestmark = pytest.mark.network

IMAGE = {"height": 32, "width": 48, "flip_prob": 0.5}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return small_dataset(tmp_path_factory.mktemp("browsed") / "d")


@pytest.fixture(scope="module")
def place(root, tmp_path_factory):
    folder = tmp_path_factory.mktemp("beside")
    drawn_layer(root, folder / "seen")
    (folder / "own.yaml").write_text("height: 32\nwidth: 48\ntrain: true\nflip_prob: 0.5\n")
    (folder / "night.yaml").write_text("kind: shuffled\nseed: 3\nfilter: night\n")
    with load(root, 2, ledger=folder / "a.ledger", order=fr.OrderSpec(seed=1)) as loader:
        steps = [list(batch["sample_key"]) for batch in loader]
    (folder / "steps.json").write_text(json.dumps(steps))
    return folder


@pytest.fixture(scope="module")
def client(root, place):
    with bench.browse(
        root,
        layers={"seen": str(place / "seen")},
        order=(str(place / "night.yaml"),),
        ledger=str(place / "a.ledger"),
        image=str(place / "own.yaml"),
    ) as browser:
        yield Client(browser.url)


class TestLists:
    def test_a_filter_selects_what_an_order_selects(self, client, root):
        found = client.json("/api/rows", filter="night and frame >= 2", columns="night\nframe")
        table = open_dataset(root).table.to_pylist()
        wanted = [n for n, row in enumerate(table) if row["night"] and row["frame"] >= 2]
        assert [tile["row"] for tile in found["rows"]] == wanted
        assert found["total"] == len(wanted)
        assert [tile["key"] for tile in found["rows"]] == [table[n]["key"] for n in wanted]
        assert found["rows"][0]["values"] == {"night": True, "frame": 2}

    def test_pages_follow_each_other(self, client):
        parts = [client.json("/api/rows", first=first, count=3)["rows"] for first in (0, 3, 6, 9)]
        assert [len(part) for part in parts] == [3, 3, 2, 0]
        assert [tile["row"] for part in parts for tile in part] == list(range(8))

    def test_clips_have_their_first_row_and_their_number_of_frames(self, client):
        found = client.json("/api/clips", filter="frame > 0")
        tiles = [(tile["clip"], tile["row"], tile["num_frames"]) for tile in found["rows"]]
        assert tiles == [("clip-0000", 1, 3), ("clip-0001", 5, 3)]

    def test_a_clip_has_its_rows_by_frame(self, client):
        found = client.json("/api/clip", row=6)
        assert found["rows"] == [4, 5, 6, 7]
        assert found["seconds"] == [0.0, 0.5, 1.0, 1.5]
        assert not found["is_cut"]

    def test_attributes_of_layers_can_be_filtered_by(self, client):
        names = client.json("/api/dataset")["attributes"]
        assert "night" in names and "seen.loss" in names
        found = client.json("/api/rows", filter="seen.loss > 2", columns="seen.loss")
        assert [tile["values"]["seen.loss"] for tile in found["rows"]] == [3.0, 4.0]

    def test_a_wrong_filter_says_why(self, client):
        status, answer = client.get("/api/rows", filter="day > 3")
        assert status == 422
        assert "no attribute 'day'" in json.loads(answer)["error"]


class TestSteps:
    def test_a_step_of_an_order_has_the_samples_of_a_loader(self, client, root, place):
        spec = fr.OrderSpec(seed=3, filter="night")
        with load(root, 2, order=spec) as loader:
            for epoch in (0, 1):
                batches = loader.make_steps(Cursor(epoch), 0, 1)
                for step, batch in enumerate(batches):
                    found = client.json(
                        "/api/order", name="night", split="train", epoch=epoch, step=step, batch=2
                    )
                    assert [tile["key"] for tile in found["rows"]] == list(batch["sample_key"])
        assert found["num_steps"] == 2

    def test_a_step_of_a_run_has_the_samples_that_it_saw(self, client, place):
        for step, keys in enumerate(json.loads((place / "steps.json").read_text())):
            found = client.json("/api/run", step=step)
            assert [tile["key"] for tile in found["rows"]] == keys
        assert client.get("/api/run", step=step + 1)[0] == 422

    def test_an_unknown_order_is_refused(self, client):
        assert client.get("/api/order", name="../night", split="train")[0] == 422


class TestSample:
    def test_it_has_what_the_dataset_has(self, client, root):
        sample = open_dataset(root)[2]
        found = client.json("/api/sample", row=2)
        assert found["meta"]["timestamp_ns"] == str(sample.meta.timestamp_ns)
        np.testing.assert_allclose(
            [box["box"] for box in found["boxes"]], sample.boxes.boxes3d, atol=0.006
        )
        place = found["place"]
        row = open_dataset(root).index.row(2)
        assert (place["offset"], place["length"]) == (row.offset, row.length)
        assert place["shard"] == "train-000000.tar"
        assert place["xxh3"] == f"{row.xxh3:016x}"

    def test_values_of_layers_are_beside_those_of_the_dataset(self, client):
        found = client.json("/api/sample", row=1)
        channels = {channel["name"]: channel for channel in found["channels"]}
        assert channels["seen.caption"]["text"] == "row 1"
        assert channels["seen.marks"]["boxes"] == [[30, 20, 50, 40]]
        assert channels["seen.marks"]["points"] == [[10, 30]]
        assert client.json("/api/attributes", row=1) == {"night": False, "seen.loss": 1.0}
        assert found["layers"]["seen"]["shard"] == "layer-000000.tar"
        assert client.json("/api/attributes", row=7) == {"night": False}

    def test_images_are_sent_as_stored(self, client, root):
        status, data = client.get("/image", row=3, sensor=1)
        assert (status, data) == (200, bytes(open_dataset(root)[3].images["cam_back"]))

    def test_thumbnails_are_small(self, client):
        _, data = client.get("/thumbnail", row=3, width=32)
        assert simplejpeg.decode_jpeg(data).shape == (24, 32, 3)

    def test_points_are_in_ego(self, client, root):
        sample = open_dataset(root)[3]
        _, data = client.get("/points", row=3)
        points = np.frombuffer(data, "<f4").reshape(-1, 3)
        lidar2ego = sample.geometry.lidar2keyego()
        expected = sample.points["lidar_top"][:, :3] @ lidar2ego[:3, :3].T + lidar2ego[:3, 3]
        np.testing.assert_allclose(points, expected, rtol=1e-5, atol=1e-4)

    def test_a_raster_is_clear_where_it_has_no_value(self, client):
        _, data = client.get("/raster", row=0, name="seen.depth")
        pixels = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_UNCHANGED)
        assert pixels.shape == (48, 64, 4)
        assert (pixels[20:30, 20:30, 3] == 255).all()
        assert pixels[..., 3].sum() == 255 * 100

    def test_a_map_has_ahead_up_and_left_left(self, client):
        found = client.json("/api/sample", row=0)
        (ground,) = [channel for channel in found["channels"] if "ground" in channel]
        assert ground["ground"] == [-10, 15, 30, -15]
        _, data = client.get("/raster", row=0, name="seen.ground")
        pixels = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_UNCHANGED)
        assert pixels.shape == (4, 3, 4)
        assert pixels[0, 0, 3] == 255
        assert pixels[..., 3].sum() == 255

    def test_it_is_shown_as_a_loader_augments_it(self, client, root):
        cameras = client.json("/api/loaded", row=2, name="own", seed=5, epoch=1)
        assert [camera["name"] for camera in cameras] == ["cam_front", "cam_back"]
        options = {"image": {**IMAGE, "train": True}, "seed": 5, "epoch": 1, "train": True}
        sheet = fr.view(root, "clip-0000-000002", **options).sheet
        assert cameras[0]["size"] == [48, 32]
        # Below the caption, and beside the boxes; JPEG changes pixels a little.
        pixels = simplejpeg.decode_jpeg(base64.b64decode(cameras[0]["image"]))
        difference = np.abs(sheet[4:36, 4:52].astype(int) - pixels)[20:]
        assert np.median(difference) < 12
        turned = set()
        for seed in range(6):
            again = client.json("/api/loaded", row=2, name="own", seed=seed)
            turned.add(tuple(camera["turned"] for camera in again))
        assert len(turned) > 1


class TestRefusals:
    @pytest.mark.parametrize("host", ["evil.example", "127.0.0.1", "127.0.0.1:1", "", None])
    def test_another_host_is_refused(self, client, host):
        status, answer = client.get("/api/dataset", headers={"Host": host})
        assert status == 403
        assert b"not the address" in answer

    def test_two_hosts_are_refused(self, client):
        text = f"GET / HTTP/1.1\r\nHost: {client.host}\r\nHost: evil\r\nCookie: {client.cookie}\r\n"
        assert client.send(text).startswith(b"HTTP/1.1 403")

    @pytest.mark.parametrize("cookie", ["", "fuelrail=x", "a=b; ;=", "\xff=\xff"])
    def test_a_request_without_the_token_is_refused(self, client, cookie):
        for path in ("/", "/app.js", "/api/dataset", "/image", "/?token=", "/?token=%00"):
            status, _ = client.get(path, headers={"Cookie": cookie})
            assert status == 403

    def test_a_page_of_another_site_is_refused(self, client):
        for site in ("cross-site", "same-site"):
            assert client.get("/api/dataset", headers={"Sec-Fetch-Site": site})[0] == 403
        assert client.get("/api/dataset", headers={"Sec-Fetch-Site": "same-origin"})[0] == 200

    @pytest.mark.parametrize(
        "path",
        [
            "/../server.py",
            "/%2e%2e/server.py",
            "//etc/passwd",
            "/page/app.js",
            "/app.js/",
            "/./app.js",
            "/api/sample/../dataset",
            "/api",
            "/dataset.json",
            "/etc/passwd",
            "*",
            "http://evil.example/app.js",
        ],
    )
    def test_no_path_leads_elsewhere(self, client, path):
        raw = client.send(
            f"GET {path} HTTP/1.1\r\nHost: {client.host}\r\nCookie: {client.cookie}\r\n"
        )
        status = int(raw.split()[1])
        is_file = path.endswith("evil.example/app.js")  # the path alone counts
        assert status == (200 if is_file else 404)

    @pytest.mark.parametrize(
        ("path", "query"),
        [
            ("/api/rows", {"first": "-1"}),
            ("/api/rows", {"count": "501"}),
            ("/api/rows", {"first": "x"}),
            ("/api/rows", {"unknown": "1"}),
            ("/api/sample", {"row": "8"}),
            ("/api/sample", {"row": "9" * 400}),
            ("/api/clip", {"row": "8"}),
            ("/image", {"row": "0", "sensor": "2"}),
            ("/thumbnail", {"row": "0", "width": "1000000"}),
            ("/points", {"sensor": "9"}),
            ("/raster", {"name": "seen.caption"}),
            ("/raster", {"name": "../x"}),
            ("/api/loaded", {"name": "/etc/passwd"}),
            ("/api/order", {"name": "night", "split": "nothing"}),
            ("/api/order", {"name": "night", "split": "train", "step": "9"}),
            ("/api/order", {"name": "night", "split": "train", "batch": "99999999"}),
        ],
    )
    def test_what_cannot_be_asked_is_one_sentence(self, client, path, query):
        status, answer = client.get(path, **query)
        assert status in (400, 404, 422)
        assert "\n" not in json.loads(answer)["error"]

    def test_nothing_is_written(self, client):
        for method in ("POST", "PUT", "DELETE", "OPTIONS", "HEAD"):
            raw = client.send(
                f"{method} /api/dataset HTTP/1.1\r\nHost: {client.host}\r\n"
                f"Cookie: {client.cookie}\r\n"
            )
            assert raw.startswith(b"HTTP/1.1 501")

    def test_each_answer_has_the_policy(self, client):
        for path in ("/", "/app.js", "/api/dataset", "/nothing"):
            headers = client.ask(path).headers
            assert "default-src 'none'" in headers["Content-Security-Policy"]
            assert "unsafe" not in headers["Content-Security-Policy"]
            assert headers["X-Content-Type-Options"] == "nosniff"
            assert "Access-Control-Allow-Origin" not in headers
            assert "Python" not in headers["Server"]

    def test_the_token_becomes_a_cookie_that_no_script_reads(self, client):
        reply = client.ask(client.url.removeprefix(f"http://{client.host}"))
        assert (reply.status, reply.headers["Location"]) == (303, "/")
        assert "HttpOnly; SameSite=Strict" in reply.headers["Set-Cookie"]

    def test_a_taken_port_is_a_sentence(self, client, root):
        port = int(client.host.rpartition(":")[2])
        with pytest.raises(fr.errors.ConfigError, match=f"port {port}: .*; 0 takes any free one"):
            bench.browse(root, port=port)


HOSTILE = '<img src=x onerror="alert(1)">\x1b]0;x\x07\u202e</script>'


class TestHostileDatasets:
    def test_texts_of_strangers_have_no_control_characters(self, root, tmp_path):
        with edited(root, tmp_path / "d") as parts:
            parts.manifest["name"] = HOSTILE
            parts.manifest["classes"] = [HOSTILE, "pedestrian"]
        with bench.browse(tmp_path / "d") as browser:
            client = Client(browser.url)
            for path in ("/api/dataset", "/api/sample"):
                _, answer = client.get(path, row=3)
                text = json.dumps(json.loads(answer), ensure_ascii=False)
                assert "onerror" in text
                assert "\x1b" not in text and "\u202e" not in text and "\\u001b" not in text

    def test_a_damaged_sample_says_so_and_where_its_bytes_are(self, root, tmp_path):
        with edited(root, tmp_path / "d"):
            pass
        shard = tmp_path / "d" / "train-000000.tar"
        data = bytearray(shard.read_bytes())
        data[2000] ^= 1
        shard.write_bytes(data)
        with bench.browse(tmp_path / "d") as browser:
            found = Client(browser.url).json("/api/sample", row=0)
        assert "checksum mismatch" in found["error"]
        assert found["place"]["offset"] == 0

    def test_a_map_that_cannot_be_drawn_says_so(self, root, tmp_path):
        shape = (40_000, 1)
        channels = [ground_channel(*shape)]
        with fr.LayerWriter(root, tmp_path / "layer", channels=channels) as writer:
            writer.write(0, {"ground": np.ones(shape, np.uint8)})
        writer.finish(partial=True)
        with bench.browse(root, layers={"t": str(tmp_path / "layer")}) as browser:
            client = Client(browser.url)
            assert client.json("/api/sample", row=0)["place"]
            status, answer = client.get("/raster", row=0, name="t.ground")
        assert status == 422
        assert "cannot be drawn" in json.loads(answer)["error"]

    EVERY = 1 if os.environ.get("FUELRAIL_ATTACK") == "all" else 40

    @pytest.mark.parametrize("name", [*cases()][::EVERY])
    def test_each_ends_in_an_answer(self, name, root, tmp_path, capfd):
        """No traceback, no other status, nothing outside of the dataset."""
        with edited(root, tmp_path / "d") as parts:
            cases()[name](parts)
        (tmp_path / "evil.bin").write_bytes(b"mine")
        try:
            browser = bench.browse(tmp_path / "d")
        except fr.FuelrailError as error:
            assert str(error)
            return
        with browser:
            client = Client(browser.url)
            for row in range(3):
                of_row = ("sample", "progress", "attributes", "clip")
                for path in (*of_row, "rows", "clips", "dataset"):
                    query = {"row": row} if path in of_row else {}
                    if path == "rows":
                        query = {"filter": "frame >= 0", "columns": "night"}
                    status, answer = client.get(f"/api/{path}", **query)
                    assert status in (200, 404, 422), answer
                    assert json.loads(answer)
                for path in ("/image", "/thumbnail", "/points"):
                    status, answer = client.get(path, row=row)
                    assert status in (200, 404, 422), answer
        assert "Traceback" not in capfd.readouterr().err
        assert (tmp_path / "evil.bin").read_bytes() == b"mine"

    @pytest.mark.parametrize("name", [*layer_cases()][::EVERY])
    def test_each_layer_ends_in_an_answer(self, name, root, tmp_path, capfd):
        with edited(small_layer(root, tmp_path / "good"), tmp_path / "layer") as parts:
            layer_cases()[name](parts)
        try:
            browser = bench.browse(root, layers={"t": str(tmp_path / "layer")})
        except fr.FuelrailError as error:
            assert str(error)
            return
        with browser:
            client = Client(browser.url)
            for row in range(8):
                for path in ("/api/sample", "/api/attributes", "/api/rows", "/raster"):
                    query = {"columns": "t.loss"} if path == "/api/rows" else {"row": row}
                    status, answer = client.get(path, **query)
                    assert status in (200, 422), answer
                    assert json.loads(answer)
        assert "Traceback" not in capfd.readouterr().err


@pytest.mark.process
def test_the_command_prints_its_address_and_ends_with_an_interrupt(root):
    source = Path(fr.__file__).parents[1]
    process = subprocess.Popen(
        [sys.executable, "-m", "fuelrail", "browse", str(root)],
        env={**os.environ, "PYTHONPATH": str(source)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    url = process.stdout.readline().split()[0]
    assert Client(url).json("/api/dataset")["num_samples"] == 8
    process.send_signal(signal.SIGINT)
    out, error = process.communicate(timeout=60)
    assert (process.returncode, out, error) == (0, "", "")


def test_a_sample_without_images_has_no_pictures(root, tmp_path):
    with edited(root, tmp_path / "d") as parts:
        for sample in parts.samples:
            for name in [name for name in sample.members if name.endswith(".jpg")]:
                del sample.members[name]
    with bench.browse(tmp_path / "d") as browser:
        client = Client(browser.url)
        assert client.get("/thumbnail", row=0)[0] == 422
        assert client.json("/api/sample", row=0)["place"]["key"] == "clip-0000-000000"


def test_a_sample_at_a_url_takes_few_requests(root, tmp_path, monkeypatch):
    """One for its bytes, and none for what else is shown of it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with FaultServer(root) as server, bench.browse(server.url) as browser:
        client = Client(browser.url)
        server.requests.clear()
        found = client.json("/api/sample", row=5)
        for sensor in (0, 1):
            assert client.get("/image", row=5, sensor=sensor)[0] == 200
        assert client.get("/points", row=5)[0] == 200
        assert client.json("/api/clip", row=5)["rows"] == [4, 5, 6, 7]
        spans = [
            (request.name.strip("/"), request.start, request.end) for request in server.requests
        ]
    place = found["place"]
    assert spans == [(place["shard"], place["offset"], place["offset"] + place["length"])]


def test_bytes_that_have_come_of_a_sample_at_a_url(root, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with FaultServer(root) as server, bench.browse(server.url) as browser:
        client = Client(browser.url)
        length = open_dataset(root).index.row(5).length
        assert client.json("/api/progress", row=5) == {"come": 0, "all": length}
        client.json("/api/sample", row=5)
        assert client.json("/api/progress", row=5) == {"come": length, "all": length}


def test_clips_of_an_index_that_is_fetched_by_parts_are_those_of_a_folder(
    client, root, tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(fetch, "WHOLE_BYTES", 1000)
    query = {"filter": "frame > 0"}
    with FaultServer(root) as server, bench.browse(server.url) as browser:
        remote = Client(browser.url)
        assert remote.json("/api/clips", **query) == client.json("/api/clips", **query)
        assert remote.json("/api/clip", row=6)["rows"] == [4, 5, 6, 7]
        assert remote.json("/api/clip", row=6)["is_cut"]


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
from fuelrail import bench
from support.browsing import Client
with bench.browse(sys.argv[1], ledger=sys.argv[2]) as browser:
    client = Client(browser.url)
    assert client.json("/api/sample", row=3)["boxes"]
    assert client.get("/thumbnail", row=3)[0] == 200
    for path in ("/api/loaded", "/api/run"):
        print(*client.get(path, name="bevdet-704x256"))
"""


@pytest.mark.process
def test_stored_samples_need_no_torch_and_the_rest_names_its_extra(root, place):
    paths = [str(Path(fr.__file__).parents[1]), str(Path(__file__).parents[3])]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, str(root), str(place / "a.ledger")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 2
    assert all(line.startswith("422 ") and "[torch]" in line for line in lines)
    assert "Traceback" not in done.stderr
