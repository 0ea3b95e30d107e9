"""vLLM's own media processors, in processes beside Chiasm's frontend."""

__version__ = "0.1.0"
