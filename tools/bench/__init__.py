"""python -m tools.bench: the other tables of docs/benchmarks.md, with the parts of ``python -m xent_ops bench``."""
