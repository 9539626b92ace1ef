"""Published formulas of a transformer's memory and FLOP: the oracle of what the planner runs and counts.

Letters as in the papers: a heads, B global batch, h hidden width, L layers, N parameters, s tokens of a sequence,
T tokens, n devices, X FLOP/s of a device, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from fuelrail.bench.planner.scenario import Recompute

SECONDS_PER_DAY = 86400


class Transformer(msgspec.Struct, frozen=True, kw_only=True):
    """Shape of a decoder. ``ffn`` None is 4 h, with ``gated`` three matrices instead of two; ``kv_heads`` None is a."""

    layers: int
    hidden: int
    heads: int
    seq: int
    vocab: int
    ffn: int | None = None
    gated: bool = False
    kv_heads: int | None = None

    @property
    def layer_parameters(self) -> float:
        """Weights of one layer's matrices."""
        keys = 2 * (self.kv_heads or self.heads) / self.heads
        wide = (3 if self.gated else 2) * (self.ffn or 4 * self.hidden)
        return self.hidden * ((2 + keys) * self.hidden + wide)

    @property
    def sample_flop(self) -> tuple[float, float, float]:
        """Forward FLOP of a sequence: of all layers' matrices, of attention (not halved for causality), of logits."""
        return (
            2 * self.seq * self.layers * self.layer_parameters,
            4 * self.seq**2 * self.hidden * self.layers,
            2 * self.seq * self.hidden * self.vocab,
        )


def layer_activation_bytes(
    model: Transformer,
    micro_batch: int,
    tp: int,
    *,
    recompute: Recompute,
    sequence_parallel: bool,
    flash: bool = False,
) -> float:
    """Bytes of one layer's 16-bit activations on a rank (Korthikanti et al., arXiv 2205.05198, table 2).

    ``flash`` attention never stores its scores, as ``selective`` recomputation does not.
    """
    sbh = model.seq * micro_batch * model.hidden
    if recompute == "full":
        return 2.0 * sbh / (tp if sequence_parallel else 1)
    scores = (
        0.0 if flash or recompute == "selective" else 5 * model.heads * model.seq / model.hidden
    )
    return sbh * ((34 + scores) / tp if sequence_parallel else 10 + (24 + scores) / tp)


def first_stage_layers(layers: int, pp: int, virtual_stages: int) -> float:
    """Layers' worth of activations that the first stage of 1F1B holds (arXiv 2205.05198, section 4.2.3)."""
    return layers * (1 + (pp - 1) / (pp * virtual_stages)) if virtual_stages > 1 else float(layers)


def parameters(model: Transformer) -> float:
    """Parameters of a GPT: 12 L h^2 (1 + 13/(12 h) + (V + s)/(12 L h)) (arXiv 2104.04473, equation 2)."""
    h = model.hidden
    layers = model.layers
    return 12 * layers * h**2 * (1 + 13 / (12 * h) + (model.vocab + model.seq) / (12 * layers * h))


def model_flop(model: Transformer, global_batch: float) -> float:
    """FLOP of a step without recomputation: three times the forward pass (arXiv 2205.05198, equation 7)."""
    return 3 * global_batch * sum(model.sample_flop)


def hardware_flop(model: Transformer, global_batch: float, recompute: Recompute) -> float:
    """FLOP of a step with what is computed again.

    ``selective`` counts the attention's scores twice in all (arXiv 2205.05198, equation 8), ``full`` adds all layers'
    forward pass (arXiv 2104.04473, section 5.1: 96 B s L h^2 (1 + s/(6h) + V/(16 L h))).
    """
    matrices, attention, _ = model.sample_flop
    recomputed = {
        "none": 0.0,
        "selective": 3 * attention,
        "full": matrices + attention,
    }[recompute]
    return model_flop(model, global_batch) + global_batch * recomputed


def utilisation(flop: float, seconds: float, devices: int, peak_flops: float) -> float:
    """Share of the devices' peak: MFU of :func:`model_flop`, HFU of :func:`hardware_flop`."""
    return flop / (seconds * devices * peak_flops)


def training_days(parameters: float, tokens: float, devices: int, flops_per_device: float) -> float:
    """Days of training with full recomputation, 8 T N / (n X) (arXiv 2104.04473, equation 4)."""
    return 8 * parameters * tokens / (devices * flops_per_device) / SECONDS_PER_DAY
