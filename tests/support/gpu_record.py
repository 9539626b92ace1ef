"""The result file of the GPU checks, written after every check; their order, and the time that is left for one."""

from __future__ import annotations

import signal
import time
import traceback
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest

from fuelrail.bench.measure.machine import MachineFacts, machine_facts
from fuelrail.bench.report.files import created_now, publish_json
from fuelrail.pipeline.errors import FuelrailError
from support.gpu_bench import CUDA, why_no_gpu

FACTS = pytest.StashKey[dict[str, Any]]()
# The most valuable first: what a run of ten minutes must show stands before what it may miss.
_FILES = (
    "test_machine",
    "test_decoder",
    "test_transfer",
    "test_feeding",
    "test_training",
    "test_beside",
)


class CheckResult(msgspec.Struct, frozen=True, kw_only=True):
    """One check: its outcome, what was measured, also by one that failed, and what was wrong."""

    name: str
    outcome: Literal["passed", "failed", "not run"]
    seconds: float
    facts: dict[str, Any]
    problem: str | None


class GpuCheck(msgspec.Struct, frozen=True, kw_only=True):
    """The result file; ``cut_off`` says why there is no more."""

    schema: str = "fuelrail-gpu-check"
    version: int = 1
    created: str
    device: str
    machine: MachineFacts
    cut_off: str | None
    checks: list[CheckResult]


def pytest_addoption(parser):
    group = parser.getgroup("gpu-check", "GPU checks (tests/gpu)")
    group.addoption(
        "--out",
        dest="gpu_out",
        type=Path,
        metavar="FILE",
        help="write a result file after every check",
    )
    group.addoption(
        "--dataset",
        dest="gpu_dataset",
        type=Path,
        help="a dataset with boxes (default: a synthetic one)",
    )
    group.addoption(
        "--seconds",
        dest="gpu_seconds",
        type=float,
        help="start no check that would end later than this",
    )


def pytest_configure(config):
    if config.getoption("gpu_out", None):
        reason = None if config.option.collectonly else why_no_gpu()
        if reason:
            pytest.exit(reason, returncode=2)
        config.pluginmanager.register(Recorder(config))


class Recorder:
    """Sorts the checks, keeps their results and writes them."""

    def __init__(self, config):
        self._out = config.option.gpu_out
        self._seconds = config.option.gpu_seconds
        self._started_s = time.monotonic()
        self._machine = machine_facts()
        self._results: list[CheckResult] = []
        self._item: pytest.Item | None = None
        self._item_started_s = self._started_s
        if not config.option.collectonly:
            before = signal.signal(signal.SIGTERM, self._stop)
            config.add_cleanup(lambda: signal.signal(signal.SIGTERM, before))

    @staticmethod
    def _stop(number, frame):
        raise KeyboardInterrupt(signal.Signals(number).name)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items):
        items.sort(
            key=lambda item: (
                _FILES.index(item.path.stem) if item.path.stem in _FILES else len(_FILES)
            )
        )

    def pytest_report_collectionfinish(self, items):
        return [f"{_budget(item):5.0f} s  {_name(item)}" for item in items]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item):
        self._item = item
        self._item_started_s = time.monotonic()
        if self._seconds is not None:
            left_s = self._seconds - (time.monotonic() - self._started_s)
            if left_s < _budget(item):
                pytest.skip(
                    f"it takes about {_budget(item):.0f} s, and {max(0.0, left_s):.0f} s are left"
                )

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report = yield
        if report.when == "call" or report.outcome != "passed":
            outcome = {"skipped": "not run"}.get(report.outcome, report.outcome)
            self._write(
                item,
                outcome,
                call.duration,
                None if call.excinfo is None else call.excinfo.value,
            )
        return report

    def pytest_keyboard_interrupt(self, excinfo):
        """Record the check under way as failed, with the facts that it has."""
        name = str(excinfo.value) or "SIGINT"
        if self._item is not None:
            lasted_s = time.monotonic() - self._item_started_s
            cut_off = f"{name} during '{_name(self._item)}'"
            self._write(
                self._item,
                "failed",
                lasted_s,
                f"stopped by {name}",
                cut_off=cut_off,
            )

    def pytest_terminal_summary(self, terminalreporter):
        for check in self._results:
            terminalreporter.write_line(
                f"{check.outcome:8}{check.name} ({check.seconds:.1f} s) {check.problem or check.facts}"
            )
        outcomes = [check.outcome for check in self._results]
        failed = outcomes.count("failed")
        num_not_run = outcomes.count("not run")
        terminalreporter.write_line(
            f"{failed} of {len(outcomes)} checks failed, {num_not_run} were not run; result in {self._out}"
        )

    def _write(self, item, outcome, seconds, problem, cut_off=None):
        """Add a result. Findings are one text; of other errors the last calls are kept too."""
        if isinstance(
            problem,
            (
                AssertionError,
                FuelrailError,
                pytest.fail.Exception,
                pytest.skip.Exception,
            ),
        ):
            problem = str(problem)
        elif isinstance(problem, BaseException):
            problem = "".join(traceback.format_exception(problem, limit=-3))
        self._results.append(
            CheckResult(
                name=_name(item),
                outcome=outcome,
                seconds=round(seconds, 2),
                facts=item.stash.get(FACTS, {}),
                problem=problem,
            )
        )
        result = GpuCheck(
            created=created_now(),
            device=str(CUDA),
            machine=self._machine,
            cut_off=cut_off,
            checks=self._results,
        )
        publish_json(self._out, result)


def _name(item) -> str:
    decoder = getattr(item, "callspec", None) and item.callspec.params.get("decoder")
    return item.originalname.removeprefix("test_").replace("_", " ") + (
        f" ({decoder})" if decoder else ""
    )


def _budget(item) -> float:
    mark = item.get_closest_marker("seconds")
    return mark.args[0] if mark else 0.0
