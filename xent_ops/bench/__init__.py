"""``python -m xent_ops bench``: this package's loss beside torch's and its peers', on your own device.

arguments.py has what the command takes, run.py the command, contestants.py who takes part, problems.py their inputs,
check.py the comparison with float64, measure.py what is done with each contestant, timing.py the clocks, report.py what
is shown. tools/bench has the other tables of docs/benchmarks.md, on the same parts.
"""
