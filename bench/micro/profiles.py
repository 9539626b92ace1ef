"""Accelerators made for measurements of single parts."""

from __future__ import annotations

from fuelrail.bench.measure.accelerator import AcceleratorProfile, ReferenceInput


def made_profile(
    name: str, device: str, *, forward_ms: float, backward_ms: float, optimiser_ms: float, derivation: str = "None."
) -> AcceleratorProfile:
    """An accelerator that takes these times for each sample of six cameras, and is alone on its network."""
    return AcceleratorProfile(
        name=name,
        device=device,
        network="none",
        per="sample",
        reference_input=ReferenceInput(cameras=6, height=256, width=704),
        forward_ms=forward_ms,
        backward_ms=backward_ms,
        optimiser_ms=optimiser_ms,
        sources=["made for this measurement"],
        derivation=derivation,
    )
