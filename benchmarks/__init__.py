"""Side-by-side measurements, each a command that prints a table.

`python -m benchmarks.NAME help=true` explains one. What is compared runs in turns on one machine,
each time in a new process. The ratios are the result.
"""
