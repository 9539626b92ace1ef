"""A test for sources whose files may be at a URL; inherited beside `SourceSuite`."""

from __future__ import annotations

import fsspec

from support.sharding import digests


class AtUrl:
    def test_the_same_bytes_from_a_url(self, made, tmp_path):
        store = fsspec.filesystem("memory")
        bucket = f"/{type(self).__name__}"
        store.put(str(made.folder / "source"), bucket, recursive=True)
        try:
            self.make(
                made.spec._replace(location=f"memory:/{bucket}"),
                tmp_path / "url",
            )
        finally:
            store.rm(bucket, recursive=True)
        assert digests(made.folder / "out") == digests(tmp_path / "url")
