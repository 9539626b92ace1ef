"""``python -m fuelrail.loaders.decode.native``: compile the native decoder into the installed
package.
"""

from __future__ import annotations

import sys

from fuelrail.loaders.decode.native.build import BuildError, build

try:
    sys.stdout.write(f"built {build()}\n")
except (BuildError, OSError) as failure:
    sys.exit(f"not built: {failure}")
