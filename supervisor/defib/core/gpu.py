"""What NVML says of the GPUs, as values, and whose they are. Reads nothing itself; a field that is None is unknown."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

NO_ACTION = 0
"""NVML's recovery action "none"."""


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process on a GPU, as NVML names it. `used` in bytes; None where the driver doesn't tell (containers, WSL)."""

    pid: int
    used: int | None = None


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU at one moment. Sizes in bytes.

    `processes` is None where the driver did not tell. `action`: NVML's recovery action, None where driver or library
    are too old. `mig`: it is cut into instances, `instances` are their UUIDs. `lost`: NVML says that it can't be
    reached any more. `problem`: why the rest is missing.
    """

    uuid: str
    pci: str = ""
    name: str = ""
    index: int = 0
    used: int | None = None
    free: int | None = None
    processes: tuple[GpuProcess, ...] | None = None
    action: int | None = None
    mig: bool = False
    instances: tuple[str, ...] = ()
    ecc_uncorrected: int | None = None
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    lost: bool = False
    problem: str = ""

    def pids(self) -> frozenset[int]:
        return frozenset(p.pid for p in self.processes or ())

    def whole(self, pids: Collection[int]) -> bool:
        """Nobody but these processes is on it, and they are: shown, not assumed. An instance is never the whole."""
        there = self.pids()
        return not self.mig and bool(there) and there <= frozenset(pids)

    def held_by(self, pids: Collection[int]) -> int:
        """Bytes that these processes hold, as far as NVML tells."""
        return sum(p.used or 0 for p in self.processes or () if p.pid in pids)


def same_device(one: str, other: str) -> bool:
    """Whether two PCI addresses name one device: the kernel writes `0000:00:06`, NVML `00000000:00:06.0`."""
    return bool(one and other) and _device(one) == _device(other)


def _device(pci: str) -> tuple[int, ...] | str:
    parts = pci.lower().split(".")[0].split(":")
    try:
        return tuple(int(part, 16) for part in (["0", *parts] if len(parts) == 2 else parts))
    except ValueError:
        return pci


def used_by(gpus: Collection[Gpu], environ: Mapping[str, str], pids: Collection[int]) -> frozenset[str]:
    """UUIDs of the GPUs that a worker with this environment uses.

    As CUDA_VISIBLE_DEVICES says, if it can be understood; else those on which one of these processes is; else, with
    a single GPU in sight, that one. Indexes count only where CUDA's order is NVML's: by request (PCI_BUS_ID), or
    because all GPUs are of one kind.
    """
    said = environ.get("CUDA_VISIBLE_DEVICES")
    if said is not None:
        named = _named(gpus, said, environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID")
        if named is not None:
            return named
    held = frozenset(g.uuid for g in gpus if not g.pids().isdisjoint(pids))
    if held or len(gpus) != 1:
        return held
    return frozenset(g.uuid for g in gpus)


def _named(gpus: Collection[Gpu], said: str, in_order: bool) -> frozenset[str] | None:
    """The GPUs of a CUDA_VISIBLE_DEVICES; None: it can't be told. As CUDA does, what follows a wrong entry is lost."""
    ordered = sorted(gpus, key=lambda g: g.index)
    sure = in_order or len({g.name for g in ordered}) <= 1
    found: list[str] = []
    for entry in (part.strip() for part in said.split(",")):
        if entry.isdigit():
            if not sure:
                return None
            match = [g for g in ordered if g.index == int(entry)]
        elif entry.startswith("GPU-"):
            match = [g for g in ordered if g.uuid.startswith(entry)]
        elif entry.startswith("MIG-"):
            match = [g for g in ordered if entry in g.instances or f"-{g.uuid}/" in entry]
        else:
            match = []
        if len(match) != 1:
            break
        found.append(match[0].uuid)
    return frozenset(found)
