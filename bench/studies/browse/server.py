"""`fuelrail browse`: a server on the loopback interface that shows a dataset in a browser, and
nothing else of this machine.

Each request needs the token of the address, which the first one moves into a cookie, and a ``Host``
that is this server: no page of somebody else can ask it. Files of the page are found by their names
and samples by their numbers; no path is made of a request.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import threading
from collections.abc import Callable, Mapping
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Final, NamedTuple, Self
from urllib.parse import parse_qsl, urlsplit

import msgspec
import numpy as np
from msgspec import Meta

from fuelrail.bench.studies.browse.query import Query
from fuelrail.bench.studies.browse.rows import DatasetRows
from fuelrail.bench.studies.browse.sample import DatasetSamples
from fuelrail.loaders.view import parse_layers
from fuelrail.pipeline.errors import ConfigError, FuelrailError
from fuelrail.pipeline.format.dataset import open_dataset
from fuelrail.pipeline.format.layers import open_layer
from fuelrail.pipeline.settings import CheckedSettings, flag, load_yaml, make_options, preset_files
from fuelrail.pipeline.text import message, shortened
from fuelrail.pipeline.transforms.image import ImageAugment

_TYPES: Final = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
_HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}
_MAX_TEXT: Final = 4000


class BrowseOptions(CheckedSettings, frozen=True, kw_only=True):
    """Options of `fuelrail.bench.browse`, and the flags of ``fuelrail browse``."""

    port: Annotated[int, Meta(ge=0, le=65535), flag("port; 0 takes any free one")] = 0
    layers: Annotated[
        dict[str, str] | None,
        flag("layers to show, too", parse=parse_layers, metavar="NAME=PATH,..."),
    ] = None
    order: Annotated[
        tuple[str, ...],
        flag("order file to show steps of; repeatable", repeat=True, metavar="FILE"),
    ] = ()
    ledger: Annotated[str | None, flag("ledger of a run to show steps of", metavar="FILE")] = None
    image: Annotated[
        str | None,
        flag("image settings of a loader, beside the presets", metavar="YAML"),
    ] = None


class Answer(NamedTuple):
    """What a request is answered with."""

    status: int
    media_type: str
    body: bytes
    headers: Mapping[str, str] = MappingProxyType({})


class Browser:
    """A dataset at ``url``, served from threads of its own until it is closed."""

    def __init__(
        self,
        rows: DatasetRows,
        samples: DatasetSamples,
        port: int = 0,
    ) -> None:
        """Serve at once; raises ConfigError where the port is taken."""
        self._rows = rows
        self._samples = samples
        page = Path(__file__).parent / "page"
        self._files = {f"/{file.name}": file for file in page.iterdir()}
        self._files["/"] = page / "index.html"
        # A media type with bytes is sent as it is, all else as JSON.
        self._calls: dict[str, Callable[[Query], Any]] = {
            "/api/dataset": lambda _: self._describe(),
            "/api/rows": rows.page,
            "/api/clips": rows.clips,
            "/api/clip": lambda query: rows.clip(query.row),
            "/api/progress": lambda query: samples.progress(query.row),
            "/api/sample": lambda query: samples.describe(query.row),
            "/api/attributes": lambda query: rows.attributes(query.row),
            "/api/loaded": samples.as_loaded,
            "/api/order": rows.step_of_order,
            "/api/run": lambda query: rows.step_of_run(query.step),
            "/image": lambda query: samples.image(query.row, query.sensor),
            "/thumbnail": lambda query: samples.thumbnail(query.row, query.sensor, query.width),
            "/raster": lambda query: samples.raster(query.row, query.name),
            "/points": lambda query: samples.points(query.row, query.sensor),
        }
        self._token = secrets.token_urlsafe(24)
        handler = partial(_Handler, self.answer)
        try:
            self._server = ThreadingHTTPServer(("127.0.0.1", port), handler)
        except OSError as error:
            raise ConfigError(f"port {port}: {error.strerror}; 0 takes any free one") from error
        port = self._server.server_address[1]
        self._hosts = {f"127.0.0.1:{port}", f"localhost:{port}"}
        self._cookie = f"fuelrail-{port}"
        self.url = f"http://127.0.0.1:{port}/?token={self._token}"
        self.thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self.thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop serving and free the port."""
        self._server.shutdown()
        self._server.server_close()
        self.thread.join()
        self._samples.close()

    def answer(self, target: str, hosts: list[str], cookies: str, site: str) -> Answer:
        """Answer a GET request by its target and by its headers ``Host``, ``Cookie`` and
        ``Sec-Fetch-Site``.
        """
        if len(hosts) != 1 or hosts[0] not in self._hosts:
            return _refuse(403, "this is not the address of the server")
        try:
            url = urlsplit(target)
            fields = dict(parse_qsl(url.query, keep_blank_values=True, max_num_fields=20))
        except ValueError:
            return _refuse(400, "the address cannot be read")
        if url.path == "/" and self._is_token(fields.get("token", "")):
            cookie = f"{self._cookie}={self._token}; Path=/; HttpOnly; SameSite=Strict"
            return Answer(
                status=303,
                media_type="text/plain",
                body=b"",
                headers={"Set-Cookie": cookie, "Location": "/"},
            )
        values = {}
        for part in cookies.split(";"):
            name, _, value = part.strip().partition("=")
            values[name] = value
        if not self._is_token(values.get(self._cookie, "")):
            return _refuse(403, "open the address that `fuelrail browse` printed")
        if url.path in self._files:
            file = self._files[url.path]
            media_type = f"{_TYPES[file.suffix]}; charset=utf-8"
            return Answer(200, media_type, file.read_bytes())
        if site not in ("", "none", "same-origin"):
            return _refuse(403, "a page of another site asked")
        if url.path not in self._calls:
            return _refuse(404, "there is no such page")
        try:
            query = msgspec.convert(fields, Query, strict=False)
            if query.row >= max(len(self._rows.dataset), 1):
                return _refuse(404, f"no row {query.row}: it has {len(self._rows.dataset)} samples")
            result = self._calls[url.path](query)
        except msgspec.ValidationError as error:
            return _refuse(400, str(error))
        except FuelrailError as error:
            return _refuse(422, str(error))
        except MemoryError:
            return _refuse(422, "there is no memory for it")
        if isinstance(result, tuple):
            media_type, body = result
            return Answer(200, media_type, body)
        return _json(200, _plain(result))

    def _is_token(self, text: str) -> bool:
        return hmac.compare_digest(text.encode(), self._token.encode())

    def _describe(self) -> dict[str, Any]:
        dataset = self._rows.dataset
        manifest = dataset.manifest
        run = self._rows.run
        return {
            "name": manifest.name,
            "location": dataset.location,
            "is_remote": dataset.url is not None,
            "num_samples": len(dataset),
            "num_clips": manifest.num_clips,
            "splits": {name: entry.num_samples for name, entry in dataset.splits.items()},
            "cameras": self._samples.cameras,
            "lidars": self._samples.lidars,
            "classes": manifest.classes,
            "places": self._samples.places,
            "colours": self._samples.colours,
            "attributes": self._rows.names(),
            "images": list(self._samples.images),
            "layers": [layer.name for layer in self._rows.layers],
            "orders": list(self._rows.orders),
            "num_steps_of_run": None if run is None else len(run),
        }


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 30

    def __init__(self, answer: Callable[..., Answer], *args: Any) -> None:
        self._answer = answer
        super().__init__(*args)

    def handle(self) -> None:
        with contextlib.suppress(ConnectionError, TimeoutError):  # the other side went away
            super().handle()

    def do_GET(self) -> None:
        headers = self.headers
        answer = self._answer(
            self.path,
            hosts=headers.get_all("Host", []),
            cookies=headers.get("Cookie", ""),
            site=headers.get("Sec-Fetch-Site", ""),
        )
        self._send(answer)

    def send_error(
        self,
        code: int,
        message: str | None = None,
        explain: str | None = None,
    ) -> None:
        self.close_connection = True
        self._send(_refuse(code, message or explain or "this is no request"))

    def version_string(self) -> str:
        return "fuelrail"

    def log_message(self, *_: Any) -> None:
        pass

    def _send(self, answer: Answer) -> None:
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.media_type)
        self.send_header("Content-Length", str(len(answer.body)))
        headers = {**_HEADERS, **answer.headers}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(answer.body)


def browse(
    dataset: str | os.PathLike[str],
    options: BrowseOptions | None = None,
    **changes: Any,  # fields of BrowseOptions
) -> Browser:
    """Serve a page on 127.0.0.1 that shows a dataset: open the ``url`` of what is returned, and
    ``close()`` it.

    Nothing is written, and nothing is read but the dataset, its layers, and the files that the
    options name. Raises ConfigError, DatasetErrors, OrderError and LedgerError.
    """
    options = make_options(BrowseOptions, options, changes)
    opened = open_dataset(dataset)
    places = options.layers or {}
    layers = [open_layer(name, place, opened, "mask") for name, place in places.items()]
    files = preset_files(ImageAugment)
    if options.image is not None:
        file = Path(options.image)
        files = {file.stem: file} | files
    images = {name: load_yaml(file, ImageAugment) for name, file in files.items()}
    rows = DatasetRows(opened, layers, options.order, options.ledger)
    samples = DatasetSamples(opened, layers, images)
    return Browser(rows, samples, options.port)


def _json(status: int, value: Any) -> Answer:
    body = msgspec.json.encode(value)
    return Answer(status, "application/json", body)


def _refuse(status: int, text: str) -> Answer:
    return _json(status, {"error": message(text)})


def _plain(value: Any) -> Any:
    """Return a value for JSON: texts of strangers cut and without control characters, and arrays as
    lists.
    """
    if isinstance(value, str):
        lines = value[:_MAX_TEXT].split("\n")
        return "\n".join(shortened(line, _MAX_TEXT) for line in lines)
    if isinstance(value, dict):
        return {_plain(str(name)): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, np.ndarray):
        return value.tolist()
    return value
