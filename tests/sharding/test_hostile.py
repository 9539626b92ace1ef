"""Hostile datasets: memory, kinds of files, words. The broad attack is in tests/attack."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import io
import json
import os
import shutil
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import msgspec
import pytest

from fuelrail import ImageAugment
from fuelrail.__main__ import main
from fuelrail.pipeline.errors import FuelrailError, IndexFileError, SourceError
from fuelrail.pipeline.format.codecs import MAX_SAMPLE_BYTES
from fuelrail.pipeline.format.dataset import open_dataset
from fuelrail.pipeline.format.manifest import (
    MANIFEST_FILE,
    encode_manifest,
    load_manifest,
)
from fuelrail.pipeline.sample.schema import BOXES, GEOMETRY, META
from fuelrail.sharding.planning.recipe import make_recipe
from fuelrail.sharding.progress import Quiet
from fuelrail.sharding.run import shard
from fuelrail.sharding.sources.registry import SourceSpec
from fuelrail.sharding.verify.dataset import verify
from fuelrail.sharding.write.packer import RawMember, ShardPacker
from fuelrail.sharding.write.read_buffer import ReadBuffer
from support.hostile import Member, edited, small_dataset, small_layer
from support.hostile_cases import cases, zeros
from support.hostile_layers import cases as layer_cases
from support.loaders import make_loader
from support.sharding import (
    Interrupt,
    digests,
    environment,
    reshard,
    shard_nuscenes,
)

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.process

GIB = 1 << 30


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    return small_dataset(tmp_path_factory.mktemp("hostile") / "small")


@pytest.fixture
def case(small, tmp_path):
    """Makes the dataset of a case."""

    def make(name: str, folder: str = "DS") -> Path:
        with edited(small, tmp_path / folder) as parts:
            cases()[name](parts)
        return tmp_path / folder

    return make


def peak_bytes(*commands: list[str]) -> tuple[int, str]:
    """The peak memory of commands in one process, beyond what their modules take [bytes], and what they printed."""
    program = """
import json, sys
from fuelrail.__main__ import main
import cv2, pyarrow.parquet, torch  # a build with CUDA takes 0.4 GB
def peak():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])
began = peak()
for words in json.loads(sys.argv[1]):
    main(words)
print(peak() - began, file=sys.stderr)
"""
    line = [sys.executable, "-c", program, json.dumps(commands)]
    done = subprocess.run(line, env=environment(), capture_output=True, text=True, timeout=280)
    assert "Traceback" not in done.stderr
    return int(done.stderr.strip().splitlines()[-1]) << 10, done.stdout + done.stderr


class TestMemory:
    @pytest.mark.parametrize(
        "name",
        [META, GEOMETRY, BOXES, "lidar_top.npy", "cam_front.jpg", "x_user.bin"],
    )
    def test_a_bomb_is_refused_by_the_index_alone(self, case, tmp_path, name):
        place = case(f"zstd/{name}-1024")
        assert "over the cap" in verify(place, deep=True, num_threads=1).as_text()
        dataset = open_dataset(place)
        with pytest.raises(IndexFileError, match="over the cap of"):
            dataset.index.row(0)
        with pytest.raises(FuelrailError, match="over the cap of"):
            reshard(place, tmp_path / "out")

    def test_the_members_of_a_sample_are_added_up(self, small, tmp_path):
        with edited(small, tmp_path / "DS") as parts:
            for number in range(5):
                parts.samples[0].members[f"x_{number}.bin"] = Member(
                    b"", "zstd", zeros(120 << 20), 120 << 20
                )
        with pytest.raises(
            IndexFileError,
            match=rf"would take \d+ bytes of memory, over the cap of {MAX_SAMPLE_BYTES}",
        ):
            open_dataset(tmp_path / "DS").index.row(0)

    def test_an_index_is_refused_before_its_compressed_buffers_are_decoded(self, case):
        compressed = [["inspect", str(case(f"arrow/{codec}", codec))] for codec in ("zstd", "lz4")]
        peak, said = peak_bytes(*compressed)
        assert said.count("its buffers are compressed") == 2
        assert peak < GIB // 4

    @pytest.mark.long
    def test_commands_stay_within_a_gibibyte(self, case, tmp_path):
        """Four members of 120 MiB."""
        place = str(case("zstd/four-allowed"))
        peak, _ = peak_bytes(
            ["verify", "--deep", place],
            ["inspect", place, "clip-0000-000000"],
            ["view", place, "--output", str(tmp_path / "s.png")],
            ["reshard", place, str(tmp_path / "out")],
        )
        assert 100 << 20 < peak < GIB

    @pytest.mark.parametrize(
        "name",
        ["offset-1=1099511627776", "length-2=1099511627776", "offset-9=-1"],
    )
    def test_index_buffers_outside_the_file_are_refused(self, case, name):
        with pytest.raises(IndexFileError, match=r"a buffer of .* lies outside the file"):
            open_dataset(case(f"arrow/{name}")).index.row(0)

    @pytest.mark.parametrize(
        ("name", "says"),
        [
            ("giant-key", "is read|over the limit"),
            ("giant-text", "is read|over the limit"),
            ("columns", "at most 4096"),
        ],
    )
    def test_giant_texts_and_columns_of_attributes(self, case, tmp_path, name, says):
        place = case(f"parquet/{name}")
        text = verify(place, deep=False, num_threads=1).as_text()
        assert "attributes.parquet" in text
        assert "OK, no errors found" not in text or name == "giant-text"
        with pytest.raises(FuelrailError, match=says.replace("is read", "are read")):
            reshard(place, tmp_path / "out")

    def test_metadata_of_many_samples_is_limited_while_scanning(self, small, tmp_path, monkeypatch):
        monkeypatch.setattr(
            "fuelrail.sharding.sources.shared.scan_table._MAX_PENDING_BYTES",
            10_000,
        )
        with pytest.raises(SourceError, match="the metadata, geometry and boxes of"):
            reshard(small, tmp_path / "out")

    def test_the_writer_keeps_to_the_caps(self, small, tmp_path, monkeypatch):
        monkeypatch.setattr("fuelrail.pipeline.format.codecs.MAX_SAMPLE_BYTES", 2000)
        with pytest.raises(
            FuelrailError,
            match=r"bytes of memory, over the caps of 4096 and 2000",
        ):
            ShardPacker(
                file=io.BytesIO(),
                number=0,
                level=3,
                dictionary=None,
                buffer=ReadBuffer(),
            ).add(
                "a",
                "a",
                0,
                0,
                [
                    RawMember("x_a.bin", "raw", bytes(1500)),
                    RawMember("x_b.bin", "raw", bytes(600)),
                ],
            )

    def test_the_writer_keeps_to_the_limit_of_texts(self, small, tmp_path, monkeypatch):
        monkeypatch.setattr("fuelrail.sharding.sources.shared.scan_table.MAX_TEXT_BYTES", 3)
        with edited(small, tmp_path / "DS") as parts:
            cases()["parquet/short-text"](parts)
        with pytest.raises(
            SourceError,
            match=r"attribute 'note' of sample .* has 4 bytes, allowed are 3; shorten it",
        ):
            reshard(tmp_path / "DS", tmp_path / "out")


@pytest.mark.parametrize("num_bytes", [1_500_000, 4_000_000])
def test_reshard_under_a_limit_of_address_space_ends_in_a_sentence(case, tmp_path, num_bytes):
    """Of the first not even OpenCV can be imported."""
    words = [
        "reshard",
        str(case(f"zstd/{BOXES}-1024")),
        str(tmp_path / "out"),
        "--workers",
        "2",
    ]
    line = f'ulimit -v {num_bytes}; exec "$0" -m fuelrail "$@"'
    done = subprocess.run(
        ["bash", "-c", line, sys.executable, *words],
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "over the cap" in done.stderr or num_bytes == 1_500_000


def test_reshard_does_not_pass_on_points_that_are_none(small, tmp_path):
    with edited(small, tmp_path / "DS") as parts:
        parts.samples[0].members["lidar_top.npy"] = Member(bytes(1000))
    with pytest.raises(SourceError, match=r"not a \.npy file"):
        reshard(tmp_path / "DS", tmp_path / "out")


def test_a_shard_number_that_is_not_there(case):
    place = case("rows/shard=99")
    with pytest.raises(
        IndexFileError,
        match="a sample in shard number 99, but the manifest has 2",
    ):
        list(make_loader(str(place), 1, image=ImageAugment(height=32, width=64), seed=1))


def test_a_manifest_without_the_cameras_of_its_samples(case):
    with pytest.raises(FuelrailError, match=r"cam_valid is \[1, 1\], but of the cameras"):
        list(
            make_loader(
                str(case("manifest/channels=[]")),
                1,
                image=ImageAugment(height=32, width=64),
                seed=1,
            )
        )


@pytest.mark.parametrize(
    "name",
    ["name=-1", "codec=-1", "name=2147483647", "codec=4611686018427387904"],
)
def test_inspect_refuses_names_and_codecs_that_are_not_there(case, capfd, name):
    assert main(["inspect", str(case(f"rows/member-{name}"))]) == 2
    assert "no such name or codec" in capfd.readouterr().err


def test_paths_and_lists_that_cannot_be(tmp_path, capfd):
    for words, says in (
        (
            [f"nuscenes:{tmp_path}", "/dev/null"],
            "output folder '/dev/null' cannot be made: '/dev/null' is not a folder",
        ),
        (
            [f"nuscenes:{'a' * 5000}", str(tmp_path / "out")],
            "cannot be read: File name too long",
        ),
        (
            [
                f"nuscenes:{tmp_path}",
                str(tmp_path / "out"),
                "--splits=/dev/zero",
            ],
            "at most 16777216 are read",
        ),
    ):
        assert main(["shard", *words]) == 2
        error = capfd.readouterr().err
        assert says in error
        assert len(error) < 400


def test_reports_print_no_escapes(case, capfd):
    for name in ("names/key4", "manifest/name=escape", "parquet/escape"):
        place = case(name)
        for words in (
            ["verify", "--deep"],
            ["inspect"],
            ["verify", "--json"],
            ["inspect", "--json"],
        ):
            main([*words, str(place)])
            said = "".join(capfd.readouterr())
            assert said.replace("\n", "").isprintable(), (name, words)
            assert "\nfuelrail: all is well" not in said
        shutil.rmtree(place)


def test_a_cut_run_json_costs_no_shards(small, tmp_path):
    out = tmp_path / "out"
    reshard(small, tmp_path / "whole", seed=1, name="whole")
    spec = SourceSpec("fuelrail", str(small), {})
    recipe = make_recipe(seed=1, name="whole")
    with pytest.raises(KeyboardInterrupt):
        shard(spec, out=out, recipe=recipe, num_workers=1, progress=Interrupt(1))
    state = out / ".fuelrail" / "run.json"
    os.truncate(state, 20)
    with pytest.raises(
        FuelrailError,
        match=r"run\.json' is cut or damaged .*: remove this one file",
    ):
        shard(spec, out=out, recipe=recipe, num_workers=1, progress=Quiet())
    state.unlink()
    shard(spec, out=out, recipe=recipe, num_workers=1, progress=Quiet())
    assert digests(out) == digests(tmp_path / "whole")


def test_a_key_twice_is_a_sentence(case, tmp_path):
    with pytest.raises(FuelrailError, match=r"the source has it twice|is not the sample's key"):
        reshard(case("names/same-key"), tmp_path / "out")


@pytest.mark.parametrize(
    "name",
    ["empty", "noise", "cut", "no-key", "two-keys", "numbers", "list", "fewer"],
)
def test_attributes_that_are_none(case, tmp_path, name):
    place = case(f"parquet/{name}")
    report = verify(place, deep=True, num_threads=1)
    assert [fault.file for fault in report.faults] == ["attributes.parquet"]
    if name not in ("no-key", "numbers"):
        with pytest.raises(FuelrailError, match=r"attributes\.parquet"):
            reshard(place, tmp_path / "out")


@pytest.mark.parametrize("ending", [[], ["--json"]])
def test_inspect_refuses_an_attribute_that_is_a_list(case, capfd, ending):
    assert main(["inspect", str(case("parquet/list")), *ending]) == 2
    assert "column 'note' has the type list<" in capfd.readouterr().err


def test_too_few_attributes_of_a_layer_are_one_fault(small, tmp_path):
    with edited(small_layer(small, tmp_path / "GOOD"), tmp_path / "layer") as parts:
        layer_cases()["layers/attributes-fewer"](parts)
    (fault,) = verify(tmp_path / "layer", deep=True, num_threads=1).faults
    assert fault.text.endswith("has 2 rows for 5 samples of the index")


@pytest.mark.parametrize(
    ("name", "says"),
    [("numbers", "do not fit together"), ("list", "has the type list<")],
)
def test_append_of_attributes_of_other_types(case, tmp_path, capfd, name, says):
    with edited(small_dataset(tmp_path / "first"), tmp_path / "other") as parts:
        for sample in parts.samples:
            sample.key = sample.row.key.replace("clip", "other")
        parts.edit_rows = lambda rows: [
            row._replace(clip_id=row.clip_id.replace("clip", "other")) for row in rows
        ]
    assert (
        main(
            [
                "reshard",
                "--append",
                str(tmp_path / "other"),
                str(case(f"parquet/{name}")),
                str(tmp_path / "o"),
            ]
        )
        == 2
    )
    assert says in capfd.readouterr().err


def test_a_rig_without_cameras(case, tmp_path):
    with pytest.raises(SourceError, match="the manifest has no sensor 'cam_front'"):
        reshard(case("manifest/channels=[]"), tmp_path / "out")


def test_no_address_space_for_the_index_is_not_called_damage(small, tmp_path):
    shutil.copytree(small, tmp_path / "DS")
    os.truncate(tmp_path / "DS" / "index.arrow", 1 << 30)
    block_digests = (
        tmp_path / "DS" / "blocks.sha256"
    ).read_bytes()  # a digest for every MiB: of shards, index and keys
    blocks = block_digests[:32] + bytes(32 << 10) + block_digests[64:]
    (tmp_path / "DS" / "blocks.sha256").write_bytes(blocks)
    manifest = load_manifest(tmp_path / "DS")
    changed = {
        "index.arrow": {"bytes": 1 << 30},
        "blocks.sha256": {
            "bytes": len(blocks),
            "sha256": hashlib.sha256(blocks).hexdigest(),
        },
    }
    files = tuple(
        msgspec.structs.replace(file, **changed.get(file.name, {})) for file in manifest.files
    )
    (tmp_path / "DS" / MANIFEST_FILE).write_bytes(
        encode_manifest(msgspec.structs.replace(manifest, files=files))
    )
    program = """
import resource, sys
from fuelrail.pipeline.format.dataset import open_dataset
from fuelrail.pipeline.errors import IndexFileError
taken = int(open("/proc/self/statm").read().split()[0]) * 4096
resource.setrlimit(resource.RLIMIT_AS, (taken + (256 << 20),) * 2)
try:
    open_dataset(sys.argv[1])
except IndexFileError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "DS")],
        capture_output=True,
        text=True,
    )
    assert "index.arrow' cannot be opened: Cannot allocate memory" in done.stdout
    assert "--repair" not in done.stdout


def test_a_full_shared_memory_is_named(dataroot, tmp_path, monkeypatch):
    from fuelrail.sharding.engines import local

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(local, "ProcessPoolExecutor", full)
    with pytest.raises(
        FuelrailError,
        match="No space left on device; they need some shared memory",
    ) as caught:
        shard_nuscenes(
            dataroot("a3 b3").root,
            tmp_path / "out",
            engine=local.LocalEngine(2, "processes"),
        )
    assert "output folder" not in str(caught.value)


@pytest.fixture
def endless():
    """A server whose every file has no end, whatever range is asked for."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            with contextlib.suppress(OSError):
                while True:
                    self.wfile.write(bytes(1 << 20))

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/DS"
        server.shutdown()
        thread.join()


@pytest.mark.network
def test_a_manifest_without_end_over_http(endless):
    with pytest.raises(FuelrailError, match=r"dataset\.json' has more than 16777216 bytes"):
        open_dataset(endless)
