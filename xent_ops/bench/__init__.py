"""``python -m xent_ops bench``: this package's loss beside torch's and its peers', on your own device.

problems.py makes the inputs, check.py compares with float64, cases.py holds the contestants, timing.py the clocks,
measure.py puts one contestant through all of it, series.py all contestants on all shapes, report.py and plot.py show
the outcome, run.py is the command, arguments.py what it takes.
linear.py is its --linear and model.py its --model, with inputs and contestants of their own: linear_problem.py and
linear_cases.py, model_problem.py and model_cases.py. ranks.py is a command of its own, for several processes.
"""
