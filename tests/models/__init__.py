"""The catalogue of test models: every one tiny, in fp64, the same on every call and in every process.

    for name, case in CASES.items():
        module, make_batch, loss_from = case.build()
        args, kwargs = make_batch(step, case.rows)
        loss = loss_from(module(*args, **kwargs))

A model with `case.random` draws from torch's generator in forward: seed it first. Others draw nothing.
"""

from tests.models import interfaces, language, layers, unusual
from tests.models.case import CASES, Batch, Built, Case

__all__ = ["CASES", "Batch", "Built", "Case", "interfaces", "language", "layers", "unusual"]
