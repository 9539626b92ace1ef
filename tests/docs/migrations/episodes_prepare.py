import json
from pathlib import Path

import pyarrow.parquet as pq

with Path("robot/frames.jsonl").open("w") as table:
    for number in range(2):
        for at, row in enumerate(pq.read_table(f"robot/data/{number}.parquet").to_pylist()):
            path = f"videos/{number}.mp4#frame={at}"
            found = {"clip_id": str(number), "timestamp_s": row["timestamp"], "cam.top.path": path}
            table.write(json.dumps({**found, "value.action": row["action"]}) + "\n")
