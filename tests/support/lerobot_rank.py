"""A rank of LeRobot's own training script with our order, which notes the frames and the loss of each step.

``-m support.lerobot_rank LOG ...``, with the arguments of ``lerobot-train``, appends a line of JSON for each batch to
``LOG/rank-R.jsonl``.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from lerobot.scripts import lerobot_train

from fuelrail.loaders.integrations.lerobot import keep_order


def main() -> None:
    """Train, and note the batches."""
    file = Path(sys.argv.pop(1)) / f"rank-{os.environ.get('RANK', 0)}.jsonl"
    log = file.open("a", buffering=1)
    update_policy = lerobot_train.update_policy

    def noted(metrics: Any, policy: Any, batch: Any, *arguments: Any, **named: Any) -> Any:
        result = update_policy(metrics, policy, batch, *arguments, **named)
        step = {"step": metrics.steps + 1, "rows": batch["index"].tolist()}
        log.write(json.dumps(step | {"loss": metrics.loss.val}) + "\n")
        return result

    lerobot_train.update_policy = noted
    keep_order(lerobot_train)
    lerobot_train.main()


if __name__ == "__main__":
    main()
