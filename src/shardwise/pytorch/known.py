"""The measured cluster, kept on disk: a second run on the same ranks plans for the same numbers, and so hits the
cache of plans. `cluster="measure"` measures anew; so does an entry older than a week."""

from __future__ import annotations

import hashlib
import json
import platform
import time

import torch

from ..cluster import Cluster, read_machine
from ..ir import disk
from .measure import local_cluster
from .world import broadcast_object, gather_objects, rank

FORMAT = 2
LARGEST_AGE_S = 7 * 86400.0
_WHAT = "the measured cluster"


def known_cluster(device: torch.device, refresh: bool = False) -> Cluster:
    """The cluster that the running ranks are, measured at most once a week. The same on every rank; a collective."""
    here = [FORMAT, platform.node(), device.type, torch.get_num_threads(), torch.__version__]
    here.append(torch.cuda.get_device_name(device) if device.type == "cuda" else read_machine().cpu_name)
    key = hashlib.sha256(json.dumps(gather_objects(here)).encode()).hexdigest()[:32]
    path = disk.cache_dir() / "clusters" / f"{key}.json"
    found = None
    if rank() == 0 and not refresh:
        found = disk.read(path, _WHAT, lambda text: _parse(text, key))
    text = broadcast_object(json.dumps(None if found is None else found.to_dict()))
    if (data := json.loads(text)) is not None:
        return Cluster.from_dict(data)
    measured = local_cluster(device=device)
    if rank() == 0:
        content = {"key": key, "measured_at": time.time(), "cluster": measured.to_dict()}
        disk.write(path, _WHAT, disk.encode("measured", content, FORMAT))
    return measured


def _parse(text: str, key: str) -> Cluster | None:
    """None where the entry is too old. Raises ValueError (InputError is one)."""
    content = disk.decode("measured", text, FORMAT)
    if content["key"] != key:
        raise ValueError("it describes other ranks")
    age_s = time.time() - float(content["measured_at"])
    return Cluster.from_dict(content["cluster"]) if 0 <= age_s < LARGEST_AGE_S else None
