import json
from pathlib import Path

import pyarrow.parquet as pq

with Path("robot/frames.jsonl").open("w") as table:
    for number in range(2):
        for frame, row in enumerate(pq.read_table(f"robot/data/{number}.parquet").to_pylist()):
            path = f"videos/{number}.mp4#frame={frame}"
            entry = {"clip_id": str(number), "timestamp_s": row["timestamp"], "cam.top.path": path}
            table.write(json.dumps({**entry, "value.action": row["action"]}) + "\n")
