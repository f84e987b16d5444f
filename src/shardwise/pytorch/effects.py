"""Operators that are run for their effect alone.

torch threads a token through them, so that none is dropped or moved. Some only look at values and raise (the check of
torch.linalg.solve that its matrix is regular): a captured program makes no such check, as none of its results depends
on it. Any other effect is refused where the graph is read.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from .compat import OpOverload, is_mutable, results_of


def without_checks(module: fx.GraphModule) -> None:
    """Removes the calls with effects whose operator gives nothing and writes nothing; their token passes."""
    for node in list(module.graph.nodes):
        if node.target is not torch.ops.higher_order.with_effects:
            continue
        token, op = node.args[0], node.args[1]
        if not isinstance(op, OpOverload) or results_of(op) or is_mutable(op):
            continue
        for user in list(node.users):
            assert user.target is operator.getitem and user.args[1] == 0, "it gives its token alone"
            user.replace_all_uses_with(token)
            module.graph.erase_node(user)
        module.graph.erase_node(node)
    module.graph.lint()
