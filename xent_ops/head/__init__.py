"""The head and the loss by chunks of rows: what the linear operators compute. Declared and checked in ops/linear/."""
