"""vLLM's own processors for media, in processes of their own beside Chiasm's frontend."""

__version__ = "0.1.0"
