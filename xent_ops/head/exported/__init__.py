"""What the linear operators compute, written to no memory that exists: for exporters, whose graphs have none.

The formulas are those of the modules of head/ with the same operators. Chunks are a graph's nodes here, so a known
number of rows is unrolled, and a symbolic one is one chunk: its memory is the exporter's. Ignored rows are computed.
"""
