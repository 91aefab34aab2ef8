"""Benchmarks of eyesplice against vanilla vLLM and its peers: `eyesplice bench`.

One case a file. Each pairs both engines in one run, lets them take turns, gives medians
and ratios with 95% intervals, and refuses to print a number when the check before it
fails. `bench` holds what the cases share, `cli` the command line.
"""
