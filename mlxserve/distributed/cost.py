"""How long hosts that share a model take for a step, with what they send each other: arithmetic.

A message takes `latency + bytes / bandwidth`: the model of Hockney 1994
(doi:10.1016/S0167-8191(06)80021-9). What is sent, and along which way, is what `group.Ranks` and
MLX's backends do. `python -m benchmarks.distributed` compares it with measured steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass

ID_BYTES = 4


@dataclass(frozen=True, slots=True)
class Link:
    """What connects hosts.

    latency_s: of a message, one way. bytes_per_s: in each direction at once. call_s: what a
    collective takes wherever it goes, to hand over between threads and devices. mesh: whether each
    host reaches each other at once; where it isn't, they are a ring, and send to the next.
    """

    name: str
    latency_s: float
    bytes_per_s: float
    call_s: float = 0.0
    mesh: bool = False

    def message_s(self, count: float) -> float:
        """Of so many bytes, from one host to the next."""
        return self.latency_s + count / self.bytes_per_s


# As measured by others between Macs, for want of any here. Collectives of MLX take longer than such
# tools' messages; how much longer isn't published, so call_s is 0 and times are bounds.
# What TCP's messages take is its stack's more than the cable's, so all three have the same: 0.3 ms
# (Geerling, "1.5 TB of VRAM on Mac Studio", 2025-12-18). Over Thunderbolt a round trip took 0.58 ms
# on average (exo pull request 2063, 2026), and 0.38 to 0.95 ms (exo issue 2295, 2026-09-02).
LINKS = {
    link.name: link
    for link in (
        # 941 Mbit/s by iperf3 (esnet/iperf issue 1170, 2021-06-24).
        Link("ethernet", 300e-6, 0.941e9 / 8),
        # Ten times that: the same share of a frame is TCP's.
        Link("10g", 300e-6, 9.41e9 / 8),
        # Thunderbolt 5: 52.6 to 63.6 Gbit/s by iperf3 (exo pull request 2063, 2026).
        Link("thunderbolt", 300e-6, 52.6e9 / 8),
        # Thunderbolt 5: 4.64 us and 68.9 to 75 Gbit/s by ib_send_lat of 4 KB and ib_send_bw of
        # 64 KB (hellas-ai/thunderbolt-ibverbs pull request 27, 2026-06-06).
        Link("rdma", 4.64e-6, 68.9e9 / 8, mesh=True),
    )
}


@dataclass(frozen=True, slots=True)
class Sent:
    """What decides how much a step sends. tokens: in the step; rows: of them that sample.

    width: of the hidden states; itemsize: bytes of a number in them, and in logits.
    """

    layers: int
    width: int
    vocabulary: int
    itemsize: int
    tokens: int
    rows: int

    @property
    def hidden_bytes(self) -> int:
        """Of the hidden states of all tokens."""
        return self.tokens * self.width * self.itemsize


def gather_s(link: Link, hosts: int, count: float) -> float:
    """To each host `count` bytes of each other, such as what all of them then add up.

    Ring: (hosts - 1) * (latency + bytes / bandwidth), from one to the next.
    Mesh: latency + bytes / bandwidth, over as many cables at once.
    """
    if hosts == 1:
        return 0.0
    return link.call_s + (1 if link.mesh else hosts - 1) * link.message_s(count)


def tensor_sent_s(link: Link, hosts: int, sent: Sent) -> float:
    """What a step of tensor parallel spends on sending, for which all hosts wait.

    Two sums a layer and one for the embedding, of all hidden states; the ids; and the parts of the
    logits, where rows sample. The ids of rows that decode are a sum; those of a prompt are sent
    with the plan. Other plans come while the step before is computed.
    """
    if hosts == 1:
        return 0.0
    took = (2 * sent.layers + 1) * gather_s(link, hosts, sent.hidden_bytes)
    ids = ID_BYTES * sent.tokens
    took += gather_s(link, hosts, ids) if sent.rows == sent.tokens else link.message_s(ids)
    if sent.rows:
        part = -(-sent.vocabulary // hosts) * sent.rows * sent.itemsize
        took += gather_s(link, hosts, part)
    return took


def tensor_s(link: Link, sent: Sent, compute_s: Sequence[float]) -> float:
    """A step of tensor parallel: the slowest host's, and what is sent.

    compute_s: of each host, for its share.
    """
    return max(compute_s) + tensor_sent_s(link, len(compute_s), sent)


def prompt_pipeline_s(link: Link, parts: Sequence[Sent], compute_s: Sequence[float]) -> float:
    """A prompt's parts through a pipeline that is empty before it and after.

    compute_s: of each host, for its layers and one part. The first part goes through all hosts; the
    others follow it as fast as the slowest host takes them.
    """
    hops_s = len(compute_s) * hop_s(link, parts[0])
    return sum(compute_s) + hops_s + (len(parts) - 1) * max(compute_s)


def hop_s(link: Link, sent: Sent, parts: int = 1) -> float:
    """The hidden states of one of so many parts, from one host to the next."""
    return link.call_s + link.message_s(sent.hidden_bytes / parts)


def pipeline_s(link: Link, sent: Sent, compute_s: Sequence[float], parts: int = 1) -> float:
    """A step of a pipeline, whose tokens go through the hosts in so many parts.

    compute_s: of each host, for its layers and one part. A part goes from each host to the next,
    and from the last to the first, which samples; meanwhile the hosts work on other parts. So a
    step takes as long as one part on its way, or as the slowest host for all parts.
    """
    hops = len(compute_s) if len(compute_s) > 1 else 0
    return max(sum(compute_s) + hops * hop_s(link, sent, parts), parts * max(compute_s))
