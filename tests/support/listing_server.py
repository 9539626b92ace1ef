"""An S3 server on loopback that lists as many objects as one likes, for what a listing takes on the client's side.

It holds none of them: keys and sizes follow from their numbers. A page has a thousand, as with any S3.
"""

from __future__ import annotations

import contextlib
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Final
from urllib.parse import parse_qs, urlsplit

from support.s3_server import s3_environment

if TYPE_CHECKING:
    from collections.abc import Iterator

OBJECT_BYTES: Final = 900
_KEYS_AT_ONCE: Final = 1000


def object_name(number: int) -> str:
    """An object's name under the URL."""
    return f"samples/CAM_FRONT/{number:09d}.jpg"


@contextlib.contextmanager
def listing_server(num_objects: int) -> Iterator[str]:
    """Serve the listing; yields the URL that has the objects. This process and its children find the server."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            """Nothing."""

        def do_GET(self) -> None:
            query = parse_qs(urlsplit(self.path).query)
            data = _page(int(query.get("continuation-token", ["0"])[0]), num_objects)
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    with s3_environment(f"http://127.0.0.1:{server.server_port}"):
        thread.start()
        try:
            yield "s3://datasets/made"
        finally:
            server.shutdown()
            thread.join()
            server.server_close()


def _page(first: int, num_objects: int) -> bytes:
    """Objects from number ``first`` on, as S3 lists them."""
    end = min(first + _KEYS_AT_ONCE, num_objects)
    entries = "".join(
        f"<Contents><Key>made/{object_name(number)}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
        f'<ETag>"{number:032x}"</ETag><Size>{OBJECT_BYTES}</Size></Contents>'
        for number in range(first, end)
    )
    more = f"<NextContinuationToken>{end}</NextContinuationToken>" if end < num_objects else ""
    return (
        f"<ListBucketResult><Name>datasets</Name><KeyCount>{end - first}</KeyCount>"
        f"<IsTruncated>{str(bool(more)).lower()}</IsTruncated>{more}{entries}</ListBucketResult>"
    ).encode()
