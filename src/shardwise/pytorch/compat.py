"""Every private name of torch that we use, each with the reason. Nothing else in the package names one."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# torch's table of decompositions: `torch.export` offers only the part of it that ends in core ATen.
from torch._decomp import decomposition_table

# AOTAutograd's joint export is the only capture that gives forward and backward as one graph with descriptors.
from torch._functorch._aot_autograd.descriptors import (
    BackwardTokenAOTInput,
    BackwardTokenAOTOutput,
    BufferAOTInput,
    ForwardTokenAOTInput,
    ForwardTokenAOTOutput,
    GradAOTOutput,
    InputMutationAOTOutput,
    ParamAOTInput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
)
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors

# How a trace brings custom operators that write into their arguments; the only description of its arguments.
from torch._higher_order_ops.auto_functionalize import AliasViewInfo as AliasView
from torch._higher_order_ops.auto_functionalize import AsStridedViewInfo as AsStridedView
from torch._higher_order_ops.auto_functionalize import NotView as NoView
from torch._higher_order_ops.auto_functionalize import SliceViewInfo as SliceView
from torch._higher_order_ops.auto_functionalize import auto_functionalized_v2
from torch._higher_order_ops.auto_functionalize import get_mutable_args as written_arguments
from torch._higher_order_ops.auto_functionalize import read_view_information_from_args as read_views
from torch._ops import OpOverload  # the type of an operator in a captured graph; it has no public name

# Fake tensors: shapes without memory. torch.export uses them under the same names.
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, mb_unwrap_functional_tensor

# Where torch's composable parallelism (fully_shard, replicate) keeps its state in a module: it looks there first.
from torch.distributed._composable.contract import REGISTRY_KEY as COMPOSABLE_REGISTRY
from torch.distributed._composable.contract import STATE_KEY as COMPOSABLE_STATE

# The audit against DTensor: simulated devices in one process, and the classes in which its rules are registered. None
# of it has a public form, and nothing of it is used in training.
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._decompositions import DecompShardingStrategy
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._dtensor_spec import TensorMeta as SpecMeta
from torch.distributed.tensor._op_schema import OpSchema, OpSpec, OpStrategy, TupleStrategy
from torch.distributed.tensor._ops.single_dim_strategy import _ShardingPlaceholder as ShardingPlaceholder
from torch.distributed.tensor.placement_types import _MaskPartial as MaskPartial
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

# A process group that sends nothing: DTensor's rules can be asked and simulated without one that does.
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

# A dictionary whose keys are objects by identity, held weakly: tensors compare by element, so WeakKeyDictionary fails.
from torch.utils.weak import WeakIdKeyDictionary

__all__ = [
    "COMPOSABLE_REGISTRY",
    "COMPOSABLE_STATE",
    "TOKENS",
    "AliasView",
    "AsStridedView",
    "BufferAOTInput",
    "DTensorSpec",
    "DecompShardingStrategy",
    "FakeStore",
    "FakeTensor",
    "FakeTensorMode",
    "GradAOTOutput",
    "InputMutationAOTOutput",
    "LocalTensor",
    "LocalTensorMode",
    "MaskPartial",
    "NoView",
    "OpOverload",
    "OpSchema",
    "OpSpec",
    "OpStrategy",
    "ParamAOTInput",
    "PlainAOTInput",
    "PlainAOTOutput",
    "ShardingPlaceholder",
    "SliceView",
    "SpecMeta",
    "TangentAOTInput",
    "TorchDispatchMode",
    "TupleStrategy",
    "ValueLess",
    "WeakIdKeyDictionary",
    "aot_export_joint_with_descriptors",
    "arguments_of",
    "auto_functionalized_v2",
    "current_tracer",
    "dtensor_of",
    "fake_mode_of",
    "is_mutable",
    "local_of",
    "make_fx",
    "operator_database",
    "operator_names",
    "overload_name",
    "read_views",
    "registered_decomposition",
    "results_of",
    "returns_list",
    "schema_of",
    "sharding_propagator",
    "simulated_parts",
    "size_arguments",
    "spec_of",
    "storage_key",
    "top_saved_tensors_hooks",
    "unwrap_functional",
    "without_torch_function",
    "written_arguments",
]


TOKENS = (BackwardTokenAOTInput, BackwardTokenAOTOutput, ForwardTokenAOTInput, ForwardTokenAOTOutput)
"""What orders operators that are run for their effect: inputs and outputs that are no tensors of the model's."""


def arguments_of(op: OpOverload) -> list[Any]:
    """The declared arguments (name, type, default_value, kwarg_only), which only the private schema has."""
    return op._schema.arguments


def results_of(op: OpOverload) -> int:
    """How many results an operator has, which only the private schema says."""
    return len(op._schema.returns)


def returns_list(op: OpOverload) -> bool:
    """Whether an operator has one result, a list, which only the private schema says."""
    returns = op._schema.returns
    return len(returns) == 1 and "List" in str(returns[0].type)


def schema_of(op: OpOverload) -> str:
    """The text of an operator's schema, which only a private attribute has."""
    return str(op._schema)


def fake_mode_of(values: Any) -> Any:
    """The mode of the fake tensors among values: operators on them need it, and a traced graph does not keep it."""
    leaves = pytree.tree_leaves(values)
    return next((v.fake_mode for v in leaves if isinstance(v, FakeTensor)), contextlib.nullcontext())


def is_mutable(op: OpOverload) -> bool:
    """Whether an operator writes into an operand, which only the private schema says."""
    return op._schema.is_mutable


def size_arguments(op: OpOverload) -> frozenset[str]:
    """Names of the arguments of type SymInt: only the text of the private schema tells them from plain integers."""
    return frozenset(re.findall(r"SymInt[\[\]\d?]*\s+(\w+)", str(op._schema)))


def storage_key(tensor: Tensor) -> int:
    """Equal for tensors that share a storage, also on the meta device, where there is no address."""
    return tensor.untyped_storage()._cdata


def overload_name(op: OpOverload) -> str:
    """`namespace.name.overload`, of parts that only private attributes have."""
    return f"{op.namespace}.{op._schema.name.split('::')[1]}.{op._overloadname}"


def registered_decomposition(op: OpOverload) -> Callable[..., Any] | None:
    """torch's own decomposition of an operator."""
    return decomposition_table.get(op)


def unwrap_functional(tensor: Tensor) -> Tensor:
    """The tensor below functionalisation.

    What a traced forward sees is a FunctionalTensor; a decomposition runs one level below and may only combine what
    lies inside it. torch passes a decomposition its operands unwrapped, but the seed is not among them.
    """
    return mb_unwrap_functional_tensor(tensor) if isinstance(tensor, FunctionalTensor) else tensor


def top_saved_tensors_hooks() -> tuple[Any, Any] | None:
    """The innermost hooks for saved tensors (pack, unpack), which have no public reader; also while tracing."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)  # pyright: ignore[reportAttributeAccessIssue]


ValueLess = (GuardOnDataDependentSymNode, DataDependentOutputException)
"""What is raised where a model asks a tensor without values for its value."""


def local_of(tensor: Tensor) -> Tensor:
    """The local tensor of a DTensor, without a node of autograd; others pass.

    The public `to_local` makes one, and DTensor's own way back builds a new spec each time: 60 us a parameter.
    """
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def spec_of(tensor: Tensor) -> Any:
    """What a DTensor knows of itself beside its local tensor; None for others."""
    return tensor._spec if isinstance(tensor, DTensor) else None


def dtensor_of(local: Tensor, spec: Any) -> DTensor:
    """A DTensor of a known spec, such as a gradient of its parameter's.

    All of it is done by `__new__`; `__init__` does nothing, but is wrapped so often that it costs as much again.
    """
    return DTensor.__new__(DTensor, local, spec, requires_grad=False)


def current_tracer() -> object | None:
    """The tracer that records operators at this moment, or None: a traced value may be reused within one only."""
    mode = get_proxy_mode()
    return None if mode is None else mode.tracer


def sharding_propagator() -> Any:
    """Where DTensor keeps its rules: no public attribute leads there."""
    return DTensor._op_dispatcher.sharding_propagator


def operator_names() -> list[str]:
    """All operators of torch, as `namespace::name.overload`: torch.ops lists only those that were asked for."""
    return torch._C._dispatch_get_all_op_names()


def operator_database() -> list[Any]:
    """The samples with which PyTorch tests its operators. Raises ImportError without the packages that they need."""
    from torch.testing._internal.common_methods_invocations import op_db

    return list(op_db)


def simulated_parts(tensor: LocalTensor) -> list[Tensor]:
    """What every simulated device holds."""
    return list(tensor._local_tensors.values())


def without_torch_function() -> Any:
    """A context in which subclasses of tensors do not intercept calls; its name has no public form."""
    return torch._C.DisableTorchFunctionSubclass()
