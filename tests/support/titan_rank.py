"""A rank of torchtitan's own trainer on the CPU: its debug model, `OrderedDataLoader`, checkpoints.

``-m support.titan_rank FOLDER STEPS LOCAL_BATCH`` appends a line of JSON for each batch to
``FOLDER/rank-R.jsonl``. torchtitan trains on accelerators only; what it asks of one is answered for
the CPU here, and its attention is the one that has a backward pass there.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch._utils
from torch.distributed.fsdp import FSDPModule

NUM_ROWS = 60
GLOBAL_BATCH = 12
SEQ_LEN = 16


def be_an_accelerator() -> None:
    """Let torchtitan find the CPU where it looks for its accelerator."""
    device = SimpleNamespace(
        **{name: getattr(torch.cpu, name) for name in dir(torch.cpu) if name[0] != "_"}
    )
    device.current_device = lambda: 0
    device.device_count = lambda: 64
    device.set_device = device.empty_cache = device.reset_peak_memory_stats = lambda *_: None
    device.get_device_name = lambda *_: "cpu"
    device.get_device_properties = lambda *_: SimpleNamespace(total_memory=2**34)
    device.memory_stats = lambda *_: {}
    torch._utils._get_available_device_type = lambda: "cpu"
    torch._utils._get_device_module = lambda _: device


class Rows(torch.utils.data.Dataset):
    """Row i counts in steps of i + 1, so a batch tells its rows."""

    def __init__(self, _: Any, seq_len: int) -> None:
        self.seq_len = seq_len

    def __len__(self) -> int:
        return NUM_ROWS

    def __getitem__(self, row: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        tokens = torch.arange(self.seq_len + 1) * (row + 1) % NUM_ROWS
        inputs = {"input": tokens[:-1], "positions": torch.arange(self.seq_len)}
        return inputs, tokens[1:]


def main() -> None:
    """Train, and log rows and losses."""
    be_an_accelerator()
    from torchtitan.components.tokenizer import BaseTokenizer
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3 import model_registry
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    from fuelrail.loaders.integrations.torchtitan import OrderedDataLoader
    from fuelrail.pipeline.order.spec import OrderSpec

    class NoTokenizer(BaseTokenizer):
        @dataclass(kw_only=True, slots=True)
        class Config(BaseTokenizer.Config):
            pass

        def __init__(self, config: Any, **_: Any) -> None:
            super().__init__()

        encode = decode = get_vocab_size = None

    folder = Path(sys.argv[1])
    config = llama3_debugmodel()
    config.model_spec = model_registry("debugmodel", attn_backend="flex")
    for layer in config.model_spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config.tokenizer = NoTokenizer.Config()
    config.dataloader = OrderedDataLoader.Config(rows=Rows, order=OrderSpec(seed=7))
    config.training.steps = int(sys.argv[2])
    config.training.local_batch_size = int(sys.argv[3])
    config.training.global_batch_size = GLOBAL_BATCH
    config.training.seq_len = SEQ_LEN
    config.training.mixed_precision_param = "float32"
    config.training.disable_cuda_graphs = True
    config.lr_scheduler.warmup_steps = 0
    config.lr_scheduler.decay_ratio = 0.0
    config.validator.enable = False
    config.activation_checkpoint = None
    config.checkpoint.enable = True
    config.checkpoint.interval = 2
    config.debug.seed = 0
    config.dump_folder = str(folder)

    trainer = config.build()
    for part in trainer.model_parts:
        for module in part.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum
    forward_backward = trainer.forward_backward_step
    log = (folder / f"rank-{torch.distributed.get_rank()}.jsonl").open("a", buffering=1)

    def logged(*, input_dict: Any, **arguments: Any) -> torch.Tensor:
        loss = forward_backward(input_dict=input_dict, **arguments)
        rows = (input_dict["input"][:, 1] - 1) % NUM_ROWS
        line = {"step": trainer.step, "rows": rows.tolist(), "loss": loss.item()}
        log.write(json.dumps(line) + "\n")
        return loss

    trainer.forward_backward_step = logged
    trainer.train()
    trainer.close()


if __name__ == "__main__":
    main()
