"""Prints facts about a Python environment as JSON for `chiasm doctor`.

Does not import vLLM, which takes many seconds.
"""

import importlib.metadata
import json
import sys
from importlib.util import find_spec

from chiasm_processor import sandbox


def version_of(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def plugin():
    """Returns the plugin's version, an import error, or None if it is not installed."""
    points = importlib.metadata.entry_points(group="vllm.general_plugins")
    if not any(point.name == "chiasm" for point in points):
        return None
    try:
        import chiasm_vllm
    except Exception as error:
        return f"can't be imported ({error})"
    return chiasm_vllm.__version__


print(
    json.dumps(
        {
            "python": "%d.%d.%d" % sys.version_info[:3],
            "vllm": version_of("vllm"),
            "plugin": plugin(),
            "missing": [
                name for name in ("msgspec", "numpy", "torch", "vllm") if find_spec(name) is None
            ],
            "sandbox": sandbox.is_available(),
        }
    )
)
