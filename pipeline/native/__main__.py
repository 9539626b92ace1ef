"""``python -m fuelrail.pipeline.native``: compile the native decoder into the installed
package.
"""

from __future__ import annotations

import sys

from fuelrail.pipeline.native.build import BuildError, build

if __name__ == "__main__":
    try:
        sys.stdout.write(f"built {build()}\n")
    except (BuildError, OSError) as failure:
        sys.exit(f"not built: {failure}")
