"""Classify storage errors and retry the transient ones, with backoff and jitter under a deadline.

A request to storage fails in one of six ways::

    missing     404                        report at once
    refused     401, 403, no credentials   report at once
    invalid     other 4xx, bad arguments   report at once
    cut         416, the file ends sooner  report at once: it is not the file that was expected
    throttled   429, 503, "slow down"      again later, with fewer requests in flight
    transient   5xx, resets, timeouts      again later

Texts of errors pass through :func:`redacted` before they are shown: URLs may carry signatures.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, NamedTuple, TypeVar

from fuelrail.pipeline.errors import FuelrailError
from fuelrail.pipeline.settings import Settings

FaultKind = Literal["missing", "refused", "invalid", "cut", "throttled", "transient"]
T = TypeVar("T")

_MAX_TEXT: Final = 300
_MAX_READS: Final = 6
_THROTTLED: Final = frozenset({429, 503})
_TRANSIENT_4XX: Final = frozenset({408, 409, 425})
_REFUSED: Final = frozenset({401, 402, 403, 407})
_RANGE_NOT_SATISFIABLE: Final = 416
_MISSING: Final = frozenset({404, 410})
_NO_CREDENTIALS: Final = (
    "NoCredentials",
    "PartialCredentials",
    "NoAuth",
    "Unauthenticated",
    "PermissionDenied",
)
_MALFORMED: Final = ("ParamValidation", "InvalidUrl", "InvalidURL")
"""Starts of the names of what botocore and aiohttp raise before a request is sent: no address,
no bucket.
"""
_ON_THE_WAY: Final = frozenset(
    {
        "ClientError",
        "BotoCoreError",
        "HTTPClientError",
        "HTTPError",
        "RequestError",
        "BaseError",
    }
)
"""Base classes of what can go wrong on a connection: aiohttp's, botocore's, urllib3's, gcsfs's,
obstore's.
"""
_CODE_IN_TEXT: Final = re.compile(r"<Code>([A-Za-z0-9.]{1,64})</Code>")
_OF_CODE: Final[dict[str, FaultKind]] = {
    **dict.fromkeys(
        ("RequestTimeTooSkewed", "RequestExpired", "RequestInTheFuture"),
        "refused",
    ),
    **dict.fromkeys(
        ("ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired"),
        "refused",
    ),
    "RequestTimeout": "transient",
    "SlowDown": "throttled",
}
"""Kinds by the storage's own code, where its HTTP status says another or no kind."""
_ADVICE: Final = {
    **dict.fromkeys(
        ("RequestTimeTooSkewed", "RequestExpired", "RequestInTheFuture"),
        "set the clock of this machine, which differs from the storage's (`timedatectl`, NTP)",
    ),
    **dict.fromkeys(
        ("ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired"),
        "the credentials have expired: get new ones",
    ),
}
_STATUS_IN_TEXT: Final = re.compile(
    r"\b(?:status|code|error|http)\D{0,24}([45]\d\d)\b", re.IGNORECASE
)
_QUERY: Final = re.compile(r"(\w+://[^\s'\"?<>]*)\?[^\s'\"<>)]*")
_USERINFO: Final = re.compile(r"(\w+://)[^\s/@'\"]+@")


class RetryPolicy(Settings, frozen=True):
    """How often and how long to try. Times in seconds.

    The ``n``-th failure is followed by a pause drawn evenly from 0 to ``min(max_delay_s,
    first_delay_s * 2**n)`` ("full jitter", Brooker, AWS Architecture Blog, 2015): clients that
    failed together do not come back together.
    """

    deadline_s: float = 120.0
    """The time from the first attempt to the report of the last error."""
    attempt_timeout_s: float = 30.0
    """A single attempt that takes longer counts as failed."""
    first_delay_s: float = 0.1
    max_delay_s: float = 5.0

    def delay_s(self, num_failures: int, draw: float) -> float:
        """Return the pause after failure number ``num_failures`` (1 for the first); ``draw`` in
        [0, 1).
        """
        # 2**60 of anything is over the cap; larger exponents would overflow a float.
        return draw * min(
            self.max_delay_s,
            self.first_delay_s * 2.0 ** min(num_failures - 1, 60),
        )


class Fault(NamedTuple):
    """One failed request: which kind, and its text without secrets."""

    kind: FaultKind
    text: str
    code: str = ""
    """The storage's own word for it, such as ``AccessDenied``; "" where it says none."""

    @property
    def advice(self) -> str:
        """What to do about a request that was refused."""
        return _ADVICE.get(
            self.code,
            "check credentials, profile and endpoint (environment or storage_options)",
        )

    @property
    def is_final(self) -> bool:
        """Whether trying again is pointless."""
        return self.kind not in ("throttled", "transient")


def fault_of(error: BaseException, storage_options: Mapping[str, Any] | None = None) -> Fault:
    """Classify an exception of any storage library."""
    match = _CODE_IN_TEXT.search(str(error))
    code = match[1] if match else ""
    for cause in (error.__cause__, error):  # that of the error itself counts most
        response = getattr(cause, "response", None)
        details = response.get("Error") if isinstance(response, dict) else None
        stated = details.get("Code") if isinstance(details, dict) else None
        if isinstance(stated, str) and stated.isalnum() and not stated.isdigit():
            code = stated
    text = type(error).__name__
    words = " ".join(str(error).split())
    if words:
        text += f": {words}"
    if len(text) > _MAX_TEXT:
        text = text[:_MAX_TEXT] + "..."
    if code not in text:  # it may be far behind the start of the text
        text = f"{code}: {text}"
    return Fault(
        kind=_OF_CODE.get(code) or _kind(error),
        text=redacted(text, storage_options),
        code=code,
    )


def _kind(error: BaseException) -> FaultKind:
    name = type(error).__name__
    if isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError):
        return "missing"
    if name == "NotFoundError":
        return "missing"
    # s3fs makes PermissionError of AccessDenied, of bad signatures and of unknown keys alike.
    if isinstance(error, PermissionError) or name.startswith(_NO_CREDENTIALS):
        return "refused"
    if name.startswith(_MALFORMED):
        return "invalid"
    status = _status(error)
    if status is None:
        names = {base.__name__ for base in type(error).__mro__}
        is_on_the_way = isinstance(error, OSError | EOFError) or names & _ON_THE_WAY
        return "transient" if is_on_the_way else "invalid"
    if status in _MISSING:
        return "missing"
    if status in _REFUSED:
        return "refused"
    if status in _THROTTLED:
        return "throttled"
    if status == _RANGE_NOT_SATISFIABLE:
        return "cut"
    return "transient" if status >= 500 or status in _TRANSIENT_4XX else "invalid"


def _status(error: BaseException) -> int | None:
    """Return the HTTP status that an error or its cause carries, in the attribute that its
    library uses.
    """
    for cause in (error, error.__cause__):
        # Botocore's ClientError, which s3fs's OSErrors have as a cause.
        response = getattr(cause, "response", None)
        statuses = []
        if isinstance(response, dict):
            metadata = response.get("ResponseMetadata", {})
            statuses.append(metadata.get("HTTPStatusCode"))
        statuses.append(getattr(cause, "status", None))
        statuses.append(getattr(cause, "status_code", None))
        for status in statuses:
            if isinstance(status, int) and 400 <= status < 600:
                return status
    library = type(error).__module__
    if library.startswith("gcsfs"):
        code = getattr(error, "code", None)
        if isinstance(code, int):
            return code
    if library.startswith("obstore"):
        match = _STATUS_IN_TEXT.search(str(error))
        if match is not None:
            return int(match[1])
    return None


def redacted(text: str, storage_options: Mapping[str, Any] | None = None) -> str:
    """Remove user names, passwords and query strings of URLs from a text, and all values of
    ``storage_options``.
    """
    text = _USERINFO.sub(r"\1", _QUERY.sub(r"\1?...", text))
    for secret in sorted(_strings(storage_options), key=len, reverse=True):
        text = text.replace(secret, "...")
    return text


def _strings(value: object) -> set[str]:
    """Return all strings of four characters or more in nested options; not plain URLs, which
    help to find mistakes.
    """
    if isinstance(value, str):
        if len(value) >= 4 and "://" not in value:
            return {value}
        return set()
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return {text for item in value for text in _strings(item)}
    return set()


def read_checked(
    read: Callable[[], bytes],
    check: Callable[[bytes], T],
    policy: RetryPolicy,
) -> T:
    """Return what ``check`` returns of the bytes read; where it raises a FuelrailError, they are
    read again.

    A proxy may change bytes on the way. The policy's pauses are between the reads. The error of the
    sixth is raised, or of bytes that were read before: they are so in storage.
    """
    before: bytes | None = None
    for number in range(1, _MAX_READS + 1):
        data = read()
        try:
            return check(data)
        except FuelrailError:
            if data == before or number == _MAX_READS:
                raise
        before = data
        time.sleep(policy.delay_s(number, random.random()))
    raise AssertionError("the last read returns or raises")


def call_with_retries(
    work: Callable[[], T],
    policy: RetryPolicy,
    on_fault: Callable[[Fault, float | None], None],
    storage_options: Mapping[str, Any] | None = None,
) -> T:
    """Call ``work`` until it succeeds.

    ``on_fault(fault, pause)`` is called for every failure; with the pause None it was the last, and
    should raise; if it does not, the original exception is raised. A FuelrailError is never tried
    again.
    """
    deadline = time.monotonic() + policy.deadline_s
    failures = 0
    while True:
        try:
            return work()
        except FuelrailError:
            raise  # judged already
        except Exception as error:
            failures += 1
            fault = fault_of(error, storage_options)
            pause_s = policy.delay_s(failures, random.random())
            if fault.is_final or time.monotonic() + pause_s > deadline:
                on_fault(fault, None)
                raise
            on_fault(fault, pause_s)
        time.sleep(pause_s)
