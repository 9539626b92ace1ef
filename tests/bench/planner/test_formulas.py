"""Closed formulas against the figures that their papers print."""

from __future__ import annotations

import pytest

from fuelrail.bench.planner import formulas
from fuelrail.bench.planner.formulas import Transformer

GPT_175B = Transformer(layers=96, hidden=12288, heads=96, seq=2048, vocab=51200)
GPT_1T = Transformer(layers=128, hidden=25600, heads=160, seq=2048, vocab=51200)


@pytest.mark.parametrize(
    ("stage", "ranks", "published_gb"), [(0, 64, 120), (1, 64, 31.4), (2, 64, 16.6), (3, 64, 1.88), (2, 1024, 15.1)]
)
def test_zero_states_are_those_of_its_figure(stage, ranks, published_gb):
    """arXiv 1910.02054, figure 1 and table 1: 7.5B parameters."""
    assert formulas.zero_state_bytes(7.5e9, ranks, stage) / 1e9 == pytest.approx(published_gb, rel=0.01)


def test_activations_of_a_trillion_parameters():
    """arXiv 2205.05198, figure 1: 131.25 GiB on the first stage, 26.56 with sequence parallel and selective."""
    layers = formulas.first_stage_layers(128, 64, 1)
    plain = formulas.layer_activation_bytes(GPT_1T, 1, 8, recompute="none", sequence_parallel=False)
    less = formulas.layer_activation_bytes(GPT_1T, 1, 8, recompute="selective", sequence_parallel=True)
    assert (plain * layers / 2**30, less * layers / 2**30) == pytest.approx((131.25, 26.5625), rel=1e-3)
    flash = formulas.layer_activation_bytes(GPT_1T, 1, 8, recompute="none", sequence_parallel=True, flash=True)
    assert flash == less


def test_utilisation_of_table_5():
    """arXiv 2205.05198, table 5: 175B on 64 A100 in 13.75 s is 51.4 % MFU and 52.8 % HFU."""
    model = formulas.utilisation(formulas.model_flop(GPT_175B, 64), 13.75, 64, 312e12)
    hardware = formulas.utilisation(formulas.hardware_flop(GPT_175B, 64, "selective"), 13.75, 64, 312e12)
    assert (model, hardware) == pytest.approx((0.514, 0.528), abs=2e-3)


def test_flop_equals_the_papers_closed_forms():
    """arXiv 2205.05198, equation 7, and arXiv 2104.04473, section 5.1."""
    s, h, layers, vocab = 2048, 12288, 96, 51200
    expected = 72 * 64 * layers * s * h**2 * (1 + s / (6 * h) + vocab / (12 * h * layers))
    assert formulas.model_flop(GPT_175B, 64) == pytest.approx(expected, rel=1e-12)
    again = 96 * 64 * layers * s * h**2 * (1 + s / (6 * h) + vocab / (16 * h * layers))
    assert formulas.hardware_flop(GPT_175B, 64, "full") == pytest.approx(again, rel=1e-12)


def test_parameters_bubble_days_and_rings():
    assert formulas.parameters(GPT_1T) / 1e9 == pytest.approx(1008.0, rel=1e-3)
    assert formulas.bubble(8, 64) == 0.109375
    assert formulas.training_days(175e9, 300e9, 1024, 140e12) == pytest.approx(34, rel=0.01)
    assert formulas.sent_bytes("all_reduce", 8, 1e9) == 1.75e9
    assert formulas.sent_bytes("all_gather", 16, 1e9) == formulas.sent_bytes("reduce_scatter", 16, 1e9) == 937.5e6


def test_gated_perceptrons_and_shared_keys():
    """Llama 3.1 8B has 6.98 billion weights in its layers' matrices (arXiv 2407.21783, table 3)."""
    llama = Transformer(layers=32, hidden=4096, heads=32, seq=8192, vocab=128256, ffn=14336, gated=True, kv_heads=8)
    assert llama.layers * llama.layer_parameters == pytest.approx(6.98e9, rel=1e-3)
