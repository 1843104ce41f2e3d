"""rakv-cluster: a cluster-wide KV-cache service for LLM inference."""

import os
from importlib.metadata import PackageNotFoundError, version

# Read by oneDNN and by PyTorch's use of it when they are loaded. A product compiled for a number of
# rows takes some 0.1 MiB, and they would keep 1,024 of each kind: 200 MiB, filled over thousands of
# requests of all lengths. The same product runs in every layer of a step, so few serve as well.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
os.environ.setdefault("LRU_CACHE_CAPACITY", "64")

try:
    __version__ = version("rakv-cluster")
except PackageNotFoundError:  # run from a source tree that was never installed
    __version__ = "0.0.0+source"
