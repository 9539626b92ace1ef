"""A server that speaks as much of the Hugging Face hub's API as reading a dataset needs, over a local folder.

https://huggingface.co/docs/hub/api; the paths are those that huggingface_hub's ``HfFileSystem`` asks for.
"""

from __future__ import annotations

import hashlib
import http.server
import json
import threading
from typing import TYPE_CHECKING, Self
from urllib.parse import unquote, urlsplit

if TYPE_CHECKING:
    from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPOSITORY = "someone/drives"


class HubServer:
    """Serves a folder as the dataset repository ``someone/drives``; ``requests`` are the lines asked."""

    def __init__(self, folder: Path) -> None:
        requests: list[str] = []
        self.requests = requests

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                requests.append(self.requestline)

            def answer(self, body: bytes, code: int = 200, **headers: str) -> None:
                self.send_response(code)
                for name, value in headers.items():
                    self.send_header(name.replace("_", "-"), value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

            def json(self, value: object, code: int = 200, **headers: str) -> None:
                self.answer(
                    json.dumps(value).encode(),
                    code,
                    Content_Type="application/json",
                    **headers,
                )

            def do_HEAD(self) -> None:
                self.do_GET()

            def do_GET(self) -> None:
                place = unquote(urlsplit(self.path).path)
                api = f"/api/datasets/{REPOSITORY}"
                resolve = f"/datasets/{REPOSITORY}/resolve/"
                if place in (api, f"{api}/revision/main"):
                    self.json(
                        {
                            "id": REPOSITORY,
                            "sha": COMMIT,
                            "private": False,
                            "tags": [],
                        }
                    )
                elif place.startswith(f"{api}/tree/"):
                    below = folder / place.removeprefix(f"{api}/tree/").partition("/")[2]
                    if below.is_dir():
                        self.json([entry(path, folder) for path in sorted(below.iterdir())])
                    else:
                        self.json(
                            {"error": "not found"},
                            404,
                            X_Error_Code="EntryNotFound",
                        )
                elif place.startswith(resolve):
                    self.file(folder / place.removeprefix(resolve).partition("/")[2])
                else:
                    self.json({"error": "not found"}, 404, X_Error_Code="RepoNotFound")

            def file(self, path: Path) -> None:
                if not path.is_file():
                    self.json(
                        {"error": "not found"},
                        404,
                        X_Error_Code="EntryNotFound",
                    )
                    return
                data = path.read_bytes()
                byte_range = self.headers.get("Range")
                facts = {
                    "ETag": f'"{blob(data)}"',
                    "X_Repo_Commit": COMMIT,
                    "Accept_Ranges": "bytes",
                }
                if byte_range is None:
                    self.answer(data, **facts)
                    return
                first, last = byte_range.removeprefix("bytes=").split("-")
                part = data[int(first) : int(last) + 1 if last else None]
                bounds = f"bytes {first}-{int(first) + len(part) - 1}/{len(data)}"
                self.answer(part, 206, Content_Range=bounds, **facts)

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def blob(data: bytes) -> str:
    """The name that git gives to these bytes."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def entry(path: Path, folder: Path) -> dict[str, object]:
    name = path.relative_to(folder).as_posix()
    if path.is_dir():
        return {"type": "directory", "path": name, "oid": "0" * 40, "size": 0}
    data = path.read_bytes()
    return {"type": "file", "path": name, "oid": blob(data), "size": len(data)}
