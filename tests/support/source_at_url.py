"""A test for sources whose files may be at a URL; inherited beside `SourceSuite`."""

from __future__ import annotations

import fsspec

from support.sharding import digests


class AtUrl:
    def test_the_same_bytes_from_a_url(self, tmp_path):
        spec = self.spec(tmp_path)
        self.make(spec, tmp_path / "folder")
        store, bucket = fsspec.filesystem("memory"), f"/{type(self).__name__}"
        store.put(str(tmp_path / "source"), bucket, recursive=True)
        try:
            self.make(spec._replace(location=f"memory:/{bucket}"), tmp_path / "url")
        finally:
            store.rm(bucket, recursive=True)
        assert digests(tmp_path / "folder") == digests(tmp_path / "url")
