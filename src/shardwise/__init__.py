"""Shardwise trains and runs an unmodified PyTorch model on many devices.

model = shardwise.parallelize(model, example=(tokens, targets))
plan = shardwise.plan(model, example, cluster="a100x8", memory_limit="40GiB")
"""

from .api import parallelize, plan
from .cluster import Cluster
from .plan.plan import Plan

__all__ = ["Cluster", "Plan", "parallelize", "plan"]
__version__ = "0.1.0"
