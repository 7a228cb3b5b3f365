"""Our loss inside models and trainers of other packages. ``import xent_ops`` imports nothing from here."""
