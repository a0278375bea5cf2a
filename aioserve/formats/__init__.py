"""Values that models and backends agree on: formats of weights, sizes of attention, how routers
choose.

Known before torch is imported, so that weights are read meanwhile into the form that the backend
wants. Knows no tensors, no model and no backend.
"""
