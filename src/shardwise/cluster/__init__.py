"""Devices, links and where their numbers come from: presets, files, a probe of this machine, fits."""

from .files import preset_names
from .fit import fit_alpha_beta
from .links import COLLECTIVES, AxisLink, Level, mesh_shapes
from .model import DTYPES, Cluster, Device
from .probe import Machine, probe_local, read_machine

__all__ = [
    "COLLECTIVES",
    "DTYPES",
    "AxisLink",
    "Cluster",
    "Device",
    "Level",
    "Machine",
    "fit_alpha_beta",
    "mesh_shapes",
    "preset_names",
    "probe_local",
    "read_machine",
]
