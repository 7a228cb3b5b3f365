"""Our loss inside models and trainers of other packages. Nothing here is imported by ``import xent_ops``."""
