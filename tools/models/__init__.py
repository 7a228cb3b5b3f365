"""``python -m tools.models``: every language model of transformers, untouched and with ``use_xent``."""
