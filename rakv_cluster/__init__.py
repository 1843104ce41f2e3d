"""rakv-cluster: a cluster-wide KV-cache service for LLM inference."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("rakv-cluster")
except PackageNotFoundError:  # run from a source tree that was never installed
    __version__ = "0.0.0+source"
