"""Step contract: what crosses between the scheduler and a runner. Frozen values, no tensors.

The scheduler builds a plan and consumes its outcome, so both run unchanged in a simulator. Knows
the parameters of requests. Must not know who plans or who computes.
"""
