from __future__ import annotations

import msgspec
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fuelrail.bench.measure.accelerator import load_profile, profile_names
from fuelrail.bench.measure.cuda import count_training_flop, peak_tflops
from fuelrail.pipeline.order.pack import Pack
from fuelrail.pipeline.order.spec import OrderSpec
from support.bench_runs import PROFILE, SETTINGS, log, report_of, steps


def test_a_linear_layers_arithmetic_is_counted():
    model = nn.Sequential(nn.Linear(8, 4, bias=False))

    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, x):
            return self.inner(x).sum()

    # 2 x 3 x 8 x 4 forward; the same again for the weights' gradients; none for the input's, which nobody asks for.
    assert count_training_flop(Loss(), [torch.ones(3, 8)]) == 2 * (2 * 3 * 8 * 4)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.costly
@pytest.mark.parametrize(
    ("layers", "width", "tokens", "vocabulary"),
    [(2, 64, 32, 128), (3, 32, 128, 64)],
)
def test_a_transformers_arithmetic_is_that_of_the_formula(layers, width, tokens, vocabulary):
    """72 B s l h^2 (1 + s / 6h + V / 12 h l): Korthikanti et al. 2022, arXiv:2205.05198, equation 7."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = nn.Linear(width, 3 * width)
            self.out = nn.Linear(width, width)
            self.up = nn.Linear(width, 4 * width)
            self.down = nn.Linear(4 * width, width)

        def forward(self, x):
            q, k, v = (
                part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1)
            )
            x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
            return x + self.down(F.gelu(self.up(x)))

    class Decoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(vocabulary, width)
            self.blocks = nn.Sequential(*(Block() for _ in range(layers)))
            self.head = nn.Linear(width, vocabulary, bias=False)

        def forward(self, x):
            return self.head(self.blocks(self.embedding(x))).sum()

    model = Decoder()
    formula = (
        72
        * 2
        * tokens
        * layers
        * width**2
        * (1 + tokens / (6 * width) + vocabulary / (12 * width * layers))
    )
    assert count_training_flop(model, [torch.zeros(2, tokens, dtype=torch.long)]) == pytest.approx(
        formula, rel=1e-12
    )
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("device", "precision", "peak"),
    [
        ("NVIDIA H200", "bf16", 989.4),
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4),
        ("NVIDIA H100 PCIe", "bf16", 756.0),
        ("NVIDIA A100-SXM4-80GB", "fp32", 156.0),
        ("Voodoo 2", "bf16", None),
    ],
)
def test_peaks_by_name(device, precision, peak):
    assert peak_tflops(device, precision) == peak


def test_an_emulated_runs_utilisation_is_the_profiles_times_occupancy():
    # 31 ms for one sample in the records' steps of two: 100 GFLOP a sample on a device of 10 TFLOPS.
    profile = msgspec.structs.replace(PROFILE, train_gflop=100.0, peak_tflops=10.0)
    settings = msgspec.structs.replace(SETTINGS, profile=profile)
    report = report_of(
        [log(steps(20, wait_ms=9)), log(steps(20, wait_ms=9))],
        settings=settings,
    )
    assert report.figures.mfu == pytest.approx(2 * 100e9 / 0.040 / 10e12)
    # Of packs a row is counted, whatever it holds.
    packed = msgspec.structs.replace(settings, order=OrderSpec(pack=Pack(budget=8, cost="x")))
    sums = {"x": (7, 9.0, 30.0)}
    ranks = [log(steps(20, wait_ms=9, num_samples=7, sums=sums)) for rank in range(2)]
    assert report_of(ranks, settings=packed).figures.mfu == pytest.approx(report.figures.mfu)


def test_without_the_arithmetic_there_is_no_figure():
    assert report_of([log(steps(20))]).figures.mfu is None


@pytest.mark.parametrize("name", profile_names())
def test_shipped_profiles_ask_for_no_more_than_the_device_has(name):
    profile = load_profile(name)
    assert profile.name == name
    assert profile.sources
    assert profile.derivation
    if profile.train_gflop is not None:
        assert (
            0.02
            < profile.train_gflop / (profile.forward_ms + profile.backward_ms) / profile.peak_tflops
            < 0.6
        )
