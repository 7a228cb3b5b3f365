"""Tables of docs/benchmarks.md that ``python -m xent_ops bench`` has not, on the same parts: python -m tools.bench"""
