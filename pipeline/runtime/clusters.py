"""The connection of a process to a Ray cluster, which is started where there is none."""

from __future__ import annotations

import os
import re
import socket
from typing import Any, Final

from fuelrail.pipeline.errors import ConfigError

_PROBE_S: Final = 10.0


def connect_ray(ray: Any, address: str | None, num_cpus: int) -> bool:
    """Connect this process to a cluster, None: a local one with this number of CPUs; return False
    if it was connected.

    A local cluster ends with the thread that calls this. Raises ConfigError where no cluster
    answers.
    """
    if ray.is_initialized():
        return False
    quiet: dict[str, Any] = {
        "log_to_driver": False,
        "configure_logging": False,
        "address": address or "local",
    }
    if address is None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a cluster of our own calls nobody
        quiet |= {"num_cpus": num_cpus, "include_dashboard": False}
    try:
        match = re.fullmatch(r"([^:/]+):([0-9]{1,5})", address or "")
        if match:
            # Ray itself would wait for minutes.
            socket.create_connection((match[1], int(match[2])), _PROBE_S).close()
        ray.init(**quiet)
    except (OSError, ValueError, RuntimeError) as error:
        text = " ".join(str(error).split())[:300]
        raise ConfigError(
            f"no Ray cluster answers at {address or 'this machine'!r} ({text}); start one "
            "with `ray start --head`, or leave the address out to start a local cluster"
        ) from error
    return True
