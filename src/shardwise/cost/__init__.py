"""What compute and collectives cost, in seconds, on a described cluster."""

from .collectives import bytes_on_wire, collective_s
from .compute import roofline_s

__all__ = ["bytes_on_wire", "collective_s", "roofline_s"]
