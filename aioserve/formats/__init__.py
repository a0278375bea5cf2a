"""Values that models and backends agree on: weight formats, attention limits, expert routing.

They need no torch, so that weights can be read in the backend's form while torch is imported.
Knows neither tensors nor models nor backends.
"""
