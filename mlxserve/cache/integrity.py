"""Whether all counts of pages add up, as they must after every step. Raises InvariantError."""

from collections import Counter
from collections.abc import Sequence as Seq

from mlxserve.cache.allocator import PageAllocator
from mlxserve.cache.prefix import Node
from mlxserve.cache.shared import ZERO_SLOT, SharedPages
from mlxserve.errors import InvariantError
from mlxserve.sequence import NO_PAGE, Sequence


def check_hot(hot: PageAllocator, seqs: Seq[Sequence], sealing: Seq[int]) -> None:
    """Hot pages have one owner each, or the step that is being planned seals them (`sealing`)."""
    hot.check(Counter([*(page for seq in seqs for page in seq.hot), *sealing]), Counter())


def check_shared(shared: SharedPages, seqs: Seq[Sequence]) -> None:
    """Sealed pages, slots and nodes are held exactly by sequences, pins and the tree."""
    cached, snapshots = shared.tree.check(shared.page_tokens)
    for group, pool in enumerate(shared.pools):
        held = [page for seq in seqs if seq.begun for page in seq.tables[group] if page != NO_PAGE]
        pins = Counter(page for pin in shared.pins.values() for page in pin.pages[group])
        pool.check(Counter(held) + pins, cached[group], pins)
    slots = [seq.slot for seq in seqs if seq.slot != NO_PAGE]
    shared.states.check(Counter([ZERO_SLOT, *slots]), snapshots)
    users = Counter(id(seq.node) for seq in seqs if seq.node is not None)
    users += Counter(id(pin.node) for pin in shared.pins.values())
    for node in shared.tree.nodes():
        if node.users != users[id(node)]:
            raise InvariantError(f"a node has {node.users} users, not {users[id(node)]}")


def check_sequence(shared: SharedPages, seq: Sequence) -> None:
    """sealed <= accepted <= computed <= its room, and it holds all that it may still read."""
    P, name = shared.page_tokens, seq.request.id
    if seq.sealed * P > seq.accepted or seq.accepted > seq.computed:
        raise InvariantError(
            f"{name}: {seq.sealed} sealed pages, {seq.accepted} accepted tokens, "
            f"{seq.computed} computed"
        )
    if seq.computed > (seq.sealed + len(seq.hot)) * P:
        raise InvariantError(f"{name}: {seq.computed} tokens computed, too few pages")
    for group, table in enumerate(seq.tables):
        needed = shared.needed(group, seq.sealed, seq.accepted)
        if len(table) < seq.sealed or any(table[number] == NO_PAGE for number in needed):
            raise InvariantError(f"{name}: a sealed page is missing")
    if seq.node is not None:
        _check_path(shared, seq)


def _check_path(shared: SharedPages, seq: Sequence) -> None:
    """A sequence holds the very pages of the tree along its tokens."""
    P, name = shared.page_tokens, seq.request.id
    node: Node | None = seq.node
    if node is None or node.depth != seq.sealed:
        raise InvariantError(f"{name}: its prefix doesn't end at its sealed pages")
    while node is not None and node.parent is not None:
        at = node.depth - 1
        if node.key != tuple(seq.ids[at * P : node.depth * P]):
            raise InvariantError(f"{name}: its prefix has other tokens")
        for table, page in zip(seq.tables, node.pages, strict=True):
            if table[at] not in (NO_PAGE, page):
                raise InvariantError(f"{name}: it holds a page beside the tree's")
        node = node.parent
