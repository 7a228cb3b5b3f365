"""``python -m xent_ops bench``: this package's loss beside torch's and its peers', on your own device.

problems.py makes the inputs, check.py compares with float64, cases.py holds the contestants, timing.py the clocks,
measure.py puts one contestant through all of it, report.py and plot.py show the outcome, run.py is the command,
arguments.py what it takes.
linear.py is its --linear, with inputs and contestants of its own: linear_problem.py and linear_cases.py.
"""
