"""GPUs, networks, and an estimate of the time of collectives; nothing is measured.

A collective of n ranks with B bytes uses NCCL's rings: B (n - 1) / n at `BANDWIDTH_SHARE` of the
slowest link, and a latency for each of the n - 1 steps. NCCL builds a ring for each network card,
so a group with 8 ranks in each machine uses 8 cards. An all-reduce takes twice as long, or uses a
tree if that has less latency.
"""

import math
from typing import NamedTuple

from training.flops import PUBLISHED_16_BIT_FLOPS

GPUS_PER_MACHINE = 8
# Share of the data sheet's bandwidth, of links and of memory, that is reached: an assumption.
BANDWIDTH_SHARE = 0.8
# Seconds of a collective's start, and of each step of a ring or tree within and between machines:
# constants by which NCCL chooses its algorithms (src/graph/tuning.cc, protocol Simple).
BASE_SECONDS = 8.4e-6
RING_SECONDS = (3.4e-6, 14e-6)
TREE_SECONDS = (4.0e-6, 14e-6)


class Gpu(NamedTuple):
    """Figures of a data sheet, in operations or bytes per second."""

    flops: float  # dense bf16
    memory_bandwidth: float
    nvlink: float  # each way
    memory: float  # bytes


GPUS = {
    # The H100 of torchtitan's cluster, with slower memory.
    "H100-HBM2e": Gpu(PUBLISHED_16_BIT_FLOPS["NVIDIA H100 80GB HBM3"], 2.4e12, 450e9, 96e9),
    "H100": Gpu(PUBLISHED_16_BIT_FLOPS["NVIDIA H100 80GB HBM3"], 3.35e12, 450e9, 80e9),
    "A100-40GB": Gpu(PUBLISHED_16_BIT_FLOPS["NVIDIA A100-SXM4-40GB"], 1.555e12, 300e9, 40e9),
    "A100": Gpu(PUBLISHED_16_BIT_FLOPS["NVIDIA A100-SXM4-80GB"], 2.04e12, 300e9, 80e9),
}
# Bytes per second and GPU, each way. Ethernet is one port of 100 Gb/s for a machine of 8 GPUs.
NETWORKS = {"NDR": 50e9, "HDR": 25e9, "Ethernet": 12.5e9 / GPUS_PER_MACHINE}


class Cluster(NamedTuple):
    """GPUs, their network, and the share of the data sheet's rate that a block reaches."""

    gpu: Gpu
    network: float
    processes: int
    utilization: float
    has_latency: bool = True

    def group(self, ranks: int, stride: int = 1) -> "Group":
        """Return the links of a group of ranks that are `stride` apart."""
        per_machine = min(ranks, max(1, GPUS_PER_MACHINE // stride))
        machines = math.ceil(ranks / per_machine)
        bandwidth = self.gpu.nvlink
        if machines > 1:
            bandwidth = min(bandwidth, per_machine * self.network)
        return Group(ranks, machines, BANDWIDTH_SHARE * bandwidth, self.has_latency)


class Group(NamedTuple):
    """Ranks that take part in a collective."""

    ranks: int
    machines: int
    bandwidth: float  # bytes per second
    has_latency: bool

    def scatter_seconds(self, size: float) -> float:
        """Return the time of an all-gather to `size` bytes, or of a reduce-scatter from them."""
        if self.ranks == 1 or size == 0:
            return 0.0
        within, between = RING_SECONDS
        steps = self.machines - 1
        latency = BASE_SECONDS + (self.ranks - 1 - steps) * within + steps * between
        return size * (self.ranks - 1) / self.ranks / self.bandwidth + latency * self.has_latency

    def all_reduce_seconds(self, size: float) -> float:
        """Return the time of an all-reduce of `size` bytes, by a ring or by a tree."""
        if self.ranks == 1 or size == 0:
            return 0.0
        within, between = TREE_SECONDS
        levels = math.log2(self.machines)
        tree = BASE_SECONDS + 2 * ((self.ranks / self.machines - 1) * within + levels * between)
        transfer = 2 * size * (self.ranks - 1) / self.ranks / self.bandwidth
        return min(2 * self.scatter_seconds(size), transfer + tree * self.has_latency)
