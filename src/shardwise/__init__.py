"""Shardwise trains and runs an unmodified PyTorch model on many devices.

model = shardwise.parallelize(model, example=(tokens, targets))
plan = shardwise.plan(model, example, cluster="a100x8", memory_limit="40GiB")
"""

from .api import parallelize, plan
from .cluster import Cluster
from .plan.plan import Plan
from .pytorch.optimizers import clip_grad_norm_
from .pytorch.state import full_state_dict

__all__ = ["Cluster", "Plan", "clip_grad_norm_", "full_state_dict", "parallelize", "plan"]
__version__ = "0.1.0"
