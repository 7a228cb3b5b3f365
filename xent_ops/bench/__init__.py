"""``python -m xent_ops bench``: this package's loss beside torch's and its peers', on your own device.

arguments.py parses the arguments. run.py is the command. contestants.py lists the functions to compare, and problems.py
makes their inputs. check.py compares with float64, measure.py checks and times each contestant, timing.py has the
clocks, and report.py prints. tools/bench makes the other tables of docs/benchmarks.md with the same parts.
"""
