"""Faults distinguished as each library words them, delays, and no secret in any text."""

from __future__ import annotations

import errno
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuelrail.pipeline.errors import ChecksumError, IndexFileError
from fuelrail.pipeline.storage import retry
from fuelrail.pipeline.storage.retry import (
    Fault,
    RetryPolicy,
    call_with_retries,
    fault_of,
    read_checked,
    redacted,
)

yarl = pytest.importorskip("yarl")
aiohttp = pytest.importorskip("aiohttp")
botocore = pytest.importorskip("botocore.exceptions")
obstore = pytest.importorskip("obstore.exceptions")


def http(status: int) -> Exception:
    url = yarl.URL("http://host/a?sig=deadbeef")
    return aiohttp.ClientResponseError(
        aiohttp.RequestInfo(url, "GET", None, url),
        (),
        status=status,
        message="no",
    )


def boto(status: int, code: str) -> Exception:
    response = {
        "ResponseMetadata": {"HTTPStatusCode": status},
        "Error": {"Code": code, "Message": "no"},
    }
    return botocore.ClientError(response, "GetObject")


def s3fs_error(status: int) -> Exception:
    error = OSError(errno.EIO, "translated")
    error.__cause__ = boto(status, "Some")
    return error


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (http(404), "missing"),
        (http(410), "missing"),
        (FileNotFoundError("x"), "missing"),
        (boto(404, "NoSuchKey"), "missing"),
        (obstore.NotFoundError("x"), "missing"),
        (http(403), "refused"),
        (http(401), "refused"),
        (PermissionError("x"), "refused"),
        (botocore.NoCredentialsError(), "refused"),
        (obstore.PermissionDeniedError("x"), "refused"),
        (obstore.UnauthenticatedError("x"), "refused"),
        (s3fs_error(403), "refused"),
        (http(400), "invalid"),
        (ValueError("x"), "invalid"),
        (TypeError("x"), "invalid"),
        (botocore.ParamValidationError(report="x"), "invalid"),
        (aiohttp.InvalidURL("http://"), "invalid"),
        (http(416), "cut"),
        (s3fs_error(416), "cut"),
        (http(429), "throttled"),
        (http(503), "throttled"),
        (boto(503, "SlowDown"), "throttled"),
        (
            obstore.GenericError("Server returned non-2xx status code: 503 Service Unavailable"),
            "throttled",
        ),
        (http(500), "transient"),
        (http(502), "transient"),
        (http(408), "transient"),
        (s3fs_error(500), "transient"),
        (
            obstore.GenericError("error sending request: connection refused"),
            "transient",
        ),
        (TimeoutError(), "transient"),
        (ConnectionResetError("x"), "transient"),
        (OSError(errno.ESTALE, "x"), "transient"),
        (aiohttp.ServerDisconnectedError(), "transient"),
        (aiohttp.ClientPayloadError("400 of 500 bytes"), "transient"),
        (botocore.EndpointConnectionError(endpoint_url="x"), "transient"),
        (EOFError(), "transient"),
    ],
)
def test_faults_are_distinguished(error, kind):
    fault = fault_of(error)
    assert fault.kind == kind
    assert fault.is_final == (kind not in ("throttled", "transient"))


@pytest.mark.parametrize(
    ("code", "status", "kind", "advice"),
    [
        ("RequestTimeTooSkewed", 403, "refused", "set the clock"),
        ("RequestExpired", 400, "refused", "set the clock"),
        ("ExpiredToken", 400, "refused", "the credentials have expired"),
        (
            "AccessDenied",
            403,
            "refused",
            "check credentials, profile and endpoint",
        ),
        ("RequestTimeout", 400, "transient", ""),
        ("SlowDown", 400, "throttled", ""),
    ],
)
@pytest.mark.parametrize("library", ["botocore", "s3fs", "obstore"])
def test_the_storages_own_code_is_kept_and_says_what_to_do(library, code, status, kind, advice):
    head = "Error performing GET http://host/bucket/" + "a" * 300
    answer = f"HTTP status code: {status}: <Error><Code>{code}</Code></Error>"
    stated = {
        "Error": {"Code": code},
        "ResponseMetadata": {"HTTPStatusCode": status},
    }
    error = obstore.GenericError(f"{head} {answer}")
    if library != "obstore":
        error = botocore.ClientError(stated, "GetObject")
    if library == "s3fs":
        cause = error
        error = OSError(errno.EIO, "x" * 400)
        error.__cause__ = cause
    fault = fault_of(error)
    assert (fault.kind, fault.code) == (kind, code)
    assert code in fault.text
    assert fault.advice.startswith(advice) or not advice


def test_a_cause_that_says_more_counts():
    payload = aiohttp.ClientPayloadError("Response payload is not completed")
    payload.__cause__ = aiohttp.http_exceptions.ContentLengthError(
        "Not enough data"
    )  # its code is 400
    assert fault_of(payload).kind == "transient"


def test_no_secret_gets_into_a_text():
    options = {
        "key": "AKIAEXAMPLE",
        "client_kwargs": {"aws_session_token": "t0k3n/xyz", "verify": True},
        "n": ["abcd"],
    }
    text = redacted(
        "GET https://user:pass@host/a?X-Amz-Signature=deadbeef failed for AKIAEXAMPLE with t0k3n/xyz, abcd",
        options,
    )
    for secret in ("AKIAEXAMPLE", "t0k3n", "pass", "deadbeef", "abcd", "user"):
        assert secret not in text
    assert "host/a" in text
    assert "deadbeef" not in fault_of(http(500)).text
    assert "deadbeef" not in fault_of(OSError("https://host/a?sig=deadbeef"), options).text


@given(st.integers(1, 5000), st.floats(0, 1, exclude_max=True))
def test_delays_are_jittered_and_capped(failures, draw):
    policy = RetryPolicy(first_delay_s=0.1, max_delay_s=5.0)
    delay = policy.delay_s(failures, draw)
    assert 0 <= delay <= min(5.0, 0.1 * 2.0 ** min(failures - 1, 60))
    assert policy.delay_s(failures, 0.5) == pytest.approx(
        0.5 * min(5.0, 0.1 * 2.0 ** min(failures - 1, 60))
    )


class TestCalls:
    POLICY = RetryPolicy(deadline_s=0.2, first_delay_s=0.001, max_delay_s=0.002)

    def test_what_fails_now_and_then_comes_through(self):
        errors = [OSError("a"), TimeoutError("b")]
        calls = []

        def work() -> int:
            if errors:
                raise errors.pop()
            return 7

        assert (
            call_with_retries(
                work,
                self.POLICY,
                lambda fault, pause: calls.append((fault.kind, pause is None)),
            )
            == 7
        )
        assert calls == [("transient", False), ("transient", False)]

    def test_what_cannot_be_helped_is_reported_at_once(self):
        calls: list[Fault] = []

        def work() -> None:
            raise PermissionError("no")

        with pytest.raises(PermissionError):
            call_with_retries(work, self.POLICY, lambda fault, pause: calls.append(fault))
        assert [fault.kind for fault in calls] == ["refused"]

    def test_the_deadline_ends_it(self, monkeypatch):
        pauses = []
        now_s = [0.0]
        clock = SimpleNamespace(
            monotonic=lambda: now_s[0],
            sleep=lambda pause_s: now_s.append(now_s.pop() + pause_s),
        )
        monkeypatch.setattr(retry, "time", clock)

        def work() -> None:
            raise OSError("down")

        with pytest.raises(OSError, match="down"):
            call_with_retries(work, self.POLICY, lambda fault, pause: pauses.append(pause))
        assert pauses[-1] is None
        assert len(pauses) > 10
        assert now_s[0] == pytest.approx(sum(pauses[:-1]))
        assert 0.198 <= now_s[0] <= 0.2  # the longest pause is 0.002 s

    def test_errors_of_ours_are_not_tried_again(self):
        calls = []

        def work() -> None:
            calls.append(1)
            raise ChecksumError("wrong")

        with pytest.raises(ChecksumError):
            call_with_retries(work, self.POLICY, lambda fault, pause: None)
        assert len(calls) == 1


class TestReadChecked:
    POLICY = RetryPolicy(first_delay_s=0)

    @pytest.mark.parametrize(
        ("answers", "num_reads"),
        [
            ([b"right"], 1),
            ([b"a", b"b", b"c", b"d", b"e", b"right"], 6),
            ([b"a", b"b", b"a", b"right"], 4),
        ],
    )
    def test_bytes_that_change_are_read_again(self, answers, num_reads) -> None:
        remaining = iter(answers)
        assert read_checked(lambda: next(remaining), self.check, self.POLICY) == b"right"
        assert len(answers) - len([*remaining]) == num_reads

    @pytest.mark.parametrize(
        ("answers", "num_reads"),
        [([b"a", b"a", b"right"], 2), ([b"%d" % n for n in range(9)], 6)],
    )
    def test_the_same_bytes_again_are_wrong_in_storage(self, answers, num_reads) -> None:
        remaining = iter(answers)
        with pytest.raises(IndexFileError, match="wrong"):
            read_checked(lambda: next(remaining), self.check, self.POLICY)
        assert len(answers) - len([*remaining]) == num_reads

    @staticmethod
    def check(data: bytes) -> bytes:
        if data != b"right":
            raise IndexFileError("wrong")
        return data
