"""What a launch costs a GPU in memory traffic: counted, while the emulator runs it."""

from dataclasses import dataclass

from mlxserve.kernels.metal.launch import Launch
from tests.support.metal import abi, signature
from tests.support.metal.emulator import run, threadgroup_bytes, threadgroup_size
from tests.support.metal.translation import Variant
from tests.support.metal.validate import check_launch

# A GPU moves whole lines between memory and a simdgroup.
LINE_BYTES = 128


@dataclass(frozen=True, slots=True)
class Traffic:
    """What moves in one direction between threads and memory.

    bytes: of all threads' accesses; moved_bytes: what several lanes of a simdgroup's access touch
    counted once; distinct_bytes: each counted once altogether, the least that must move;
    transactions: lines of 128 bytes that each access of a simdgroup touches, added up;
    transactions_needed: if what each touches lay in a row from the start of a line.
    """

    bytes: int = 0
    moved_bytes: int = 0
    distinct_bytes: int = 0
    transactions: int = 0
    transactions_needed: int = 0

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(
            self.bytes + other.bytes,
            self.moved_bytes + other.moved_bytes,
            self.distinct_bytes + other.distinct_bytes,
            self.transactions + other.transactions,
            self.transactions_needed + other.transactions_needed,
        )

    @property
    def redundancy(self) -> float:
        """How often each byte moves, on average; 1 is the least. 0 where nothing moves."""
        return self.bytes / self.distinct_bytes if self.bytes else 0.0

    @property
    def coalescing(self) -> float:
        """Transactions for each one needed; 1 is the least. 0 where nothing moves."""
        return self.transactions / self.transactions_needed if self.transactions else 0.0


@dataclass(frozen=True, slots=True)
class BufferCost:
    """The traffic of one buffer. space: "device" or "constant"."""

    space: str
    loads: Traffic
    stores: Traffic


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of a launch.

    buffers: by the names of the function's parameters, so a shape that the kernel reads is one of
    them; threadgroup_loaded, threadgroup_stored: bytes of all threads' accesses to threadgroup
    memory; threadgroup_bytes: of memory that a threadgroup takes; threadgroups: how many run;
    barriers: of a threadgroup, each counted once for all its threads; simd_operations: each counted
    once for all lanes, a simdgroup's barrier included; arithmetic: float operations of all threads
    as arithmetic.py counts them, without those of simd operations.
    """

    buffers: dict[str, BufferCost]
    threadgroup_loaded: int
    threadgroup_stored: int
    threadgroup_bytes: int
    threadgroups: int
    barriers: int
    simd_operations: int
    arithmetic: int

    def loads(self, space: str = "device") -> Traffic:
        """All loads from an address space, "device" or "constant"."""
        return sum((b.loads for b in self.buffers.values() if b.space == space), Traffic())

    def stores(self) -> Traffic:
        """All stores to device memory."""
        return sum((b.stores for b in self.buffers.values()), Traffic())

    @property
    def device_bytes(self) -> int:
        """Bytes loaded from and stored to device memory."""
        return self.loads().bytes + self.stores().bytes

    @property
    def device_bytes_needed(self) -> int:
        """The same with each byte counted once in each direction: the least possible."""
        return self.loads().distinct_bytes + self.stores().distinct_bytes


def cost(launch: Launch, *, timeout_s: int = 600) -> Cost:
    """Run a launch with checks and count its traffic. Raises as `emulate` does.

    The compiler here decides which loads remain, at its first level of optimisation: a value that
    is used twice is loaded once, neighbouring scalar loads are not merged, and of a vector that is
    loaded whole 2 or 4 elements are one access; a vector of 3 is three. Caches are not modelled.
    """
    check_launch(launch)
    settings = abi.Settings(
        grid=launch.grid,
        threadgroup=threadgroup_size(launch),
        check=True,
        count=True,
        timeout_s=timeout_s,
    )
    done = run(launch, Variant(count=True), settings)
    buffers = [p for p in signature.parameters(launch) if p.kind != "attribute"]
    groups = 1
    for threads, size in zip(settings.grid, settings.threadgroup, strict=True):
        groups *= -(-threads // size)
    report = done.report
    return Cost(
        buffers={
            parameter.name: BufferCost(
                parameter.space, _traffic(report.loads[i]), _traffic(report.stores[i])
            )
            for i, parameter in enumerate(buffers)
        },
        threadgroup_loaded=report.threadgroup_loaded,
        threadgroup_stored=report.threadgroup_stored,
        threadgroup_bytes=threadgroup_bytes(launch, report, check=True),
        threadgroups=groups,
        barriers=report.barriers,
        simd_operations=report.simd_operations,
        arithmetic=report.arithmetic,
    )


def _traffic(raw: abi.Traffic) -> Traffic:
    return Traffic(
        raw.bytes,
        raw.moved_bytes,
        raw.distinct_bytes,
        raw.transactions,
        raw.transactions_needed,
    )
