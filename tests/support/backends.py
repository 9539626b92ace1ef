"""The decode backends as test parameters: those that are not installed are skipped, with the reason."""

from __future__ import annotations

import importlib.util

import pytest

HAS_DALI = (
    importlib.util.find_spec("nvidia") is not None
    and importlib.util.find_spec("nvidia.dali") is not None
)

needs_dali = pytest.mark.skipif(not HAS_DALI, reason="NVIDIA DALI is not installed")


def dali_on_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let DALI run a GPU's graph, and everything around it, in host memory."""
    from fuelrail.loaders.decode import dali

    pipeline_class = dali.Pipeline
    monkeypatch.setattr(dali, "_MIXED", "cpu")
    monkeypatch.setattr(
        dali,
        "Pipeline",
        lambda *args, **options: pipeline_class(*args, **{**options, "device_id": None}),
    )


BACKENDS = ["turbo", "pillow", pytest.param("dali", marks=needs_dali)]
