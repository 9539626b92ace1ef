"""Layers written to an object store: a real S3 server on loopback, several writers, the loader reading them there."""

from __future__ import annotations

import pytest

from fuelrail import DataLoader
from fuelrail.bench.annotation.run import annotate
from fuelrail.pipeline.errors import DatasetError, DatasetExistsError
from fuelrail.sharding.verify.dataset import verify
from fuelrail.sharding.write.layers.writer import LayerWriter
from support.datasets import build_dataset
from support.layers import TABLE, digests, values_of, write_layer
from support.s3_server import s3_server

pytestmark = pytest.mark.network

s3fs = pytest.importorskip("s3fs", reason="s3fs is not installed: pip install -e '.[s3]'")


@pytest.fixture(scope="module")
def bucket(tmp_path_factory):
    with s3_server(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        fs = s3fs.S3FileSystem(skip_instance_cache=True)
        fs.mkdir("layers")
        yield fs


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    root = tmp_path_factory.mktemp("base") / "base"
    build_dataset(root, {"train": (5, 4), "val": (3,)})
    return root


def download_digests(bucket, url: str, to) -> dict[str, str]:
    """The digests of all files at a URL."""
    bucket.invalidate_cache()
    bucket.get(url, str(to), recursive=True)
    return digests(to)


def test_two_writers_and_an_interruption_do_not_show(base, bucket, tmp_path) -> None:
    local_layer = write_layer(base, tmp_path / "teacher")
    url = "s3://layers/writers/teacher"
    with (
        LayerWriter(base, url, channels=TABLE) as first_writer,
        LayerWriter(base, url, channels=TABLE) as second_writer,
    ):
        for position in range(0, 12, 3):
            first_writer.write(position, values_of(position))
        for position in range(1, 12, 3):
            second_writer.write(position, values_of(position))
        first_writer.flush()
        assert second_writer.written().nonzero()[0].tolist() == [0, 3, 6, 9]
    writer = LayerWriter(base, url, channels=TABLE)
    with pytest.raises(DatasetError, match="4 of 12 samples have no row"):
        writer.finish()
    for position in (~writer.written()).nonzero()[0].tolist():
        writer.write(position, values_of(position))
    manifest = writer.finish()
    assert manifest.fingerprint == second_writer.finish().fingerprint
    assert download_digests(bucket, url, tmp_path / "brought") == digests(local_layer)
    assert LayerWriter(base, url, channels=TABLE).written().all()
    with pytest.raises(DatasetError, match="is finished"):
        LayerWriter(base, url, channels=TABLE).write(0, values_of(0))
    with pytest.raises(DatasetExistsError, match="holds another layer"):
        LayerWriter(base, url, channels=TABLE[:1])


def test_it_is_loaded_and_verified_where_it_was_written(base, bucket) -> None:
    url = "s3://layers/loaded/teacher"
    write_layer(base, url)
    image = {"height": 32, "width": 48}
    with DataLoader(
        base,
        3,
        shuffle=False,
        layers={"t": url},
        transforms={"image": image},
        num_workers=1,
    ) as loader:
        rows = [
            (row, loss)
            for batch in loader
            for row, loss in zip(batch["global_index"], batch["t.loss"], strict=True)
        ]
    assert len(rows) == 9 and all(float(loss) == float(row) / 2 for row, loss in rows)
    assert not verify(url, deep=True, num_threads=1).faults


def test_two_layers_started_at_once_with_differing_tables(base, bucket) -> None:
    url = "s3://layers/differing/teacher"
    writer = LayerWriter(base, url, channels=TABLE)
    bucket.rm(
        "layers/differing/teacher/.fuelrail/layer.json"
    )  # as if both had looked before either wrote
    LayerWriter(base, url, channels=TABLE[:1])
    with pytest.raises(
        DatasetExistsError,
        match=r'holds another layer: channels\.loss: none there, {"name":"loss",',
    ):
        writer.finish()


def test_annotate_writes_to_a_url(base, bucket, tmp_path) -> None:
    def model(batch):
        return {"mean": batch["img"].float().flatten(1).mean(1)}

    options = {
        "batch_size": 4,
        "transforms": {"image": {"height": 32, "width": 48}},
        "workers": 1,
    }
    local_report = annotate(base, tmp_path / "mean", model, **options)
    url_report = annotate(base, "s3://layers/annotated/mean", model, **options)
    assert url_report.fingerprint == local_report.fingerprint is not None
    assert download_digests(bucket, "s3://layers/annotated/mean", tmp_path / "brought") == digests(
        tmp_path / "mean"
    )
