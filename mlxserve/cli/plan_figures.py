"""The figures of `mlxserve plan`, each with its formula."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from mlxserve import device
from mlxserve.cache.groups import group_layers
from mlxserve.cache.spec import (
    PAGE_TOKENS,
    STATE_ITEMSIZE,
    UNPACKED,
    VALUE_GROUP,
    KVBits,
    Latent,
    LayerSpec,
    PagedSpec,
    State,
    page_bytes,
    state_bytes,
    token_bytes,
)
from mlxserve.config import EngineConfig
from mlxserve.engine import cache_plan, estimates
from mlxserve.engine.footprint import USEFUL_CONTEXT_TOKENS, Parts
from mlxserve.errors import RequestError
from mlxserve.memory import SPARE_FRACTION, StepShape, device_limit_bytes
from mlxserve.report import count_binary as size

MEMORY = "Memory"


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedModel:
    """A model as its config and the sizes of its files describe it. kind: its model_type.

    weight_bytes: once loaded on this device; counted: from the config, since no files are here.
    float32: whether the files hold, or would hold, float32. width: of the hidden states. step: what
    a step makes. parts: of the parameters.
    """

    name: str
    kind: str
    specs: tuple[LayerSpec, ...]
    context_tokens: int
    parameters: int
    weight_bytes: int
    counted: bool
    float32: bool
    width: int
    step: StepShape
    parts: Parts


@dataclass(frozen=True, slots=True)
class Setting:
    """A model with a load on a machine. itemsize: bytes of a key's or value's unpacked number."""

    model: PlannedModel
    context_tokens: int
    users: int
    itemsize: int
    bits: KVBits
    memory_bytes: int

    @property
    def room_bytes(self) -> int:
        """What the engine gives the cache, with its usual rows and tokens in a step."""
        shape = cache_plan.cache_shape(
            group_layers(self.model.specs, self.bits),
            self.model.step,
            itemsize=self.itemsize,
            tokens=cache_plan.step_tokens(EngineConfig()),
        )
        return shape.room_bytes(self.memory_bytes - self.model.weight_bytes, self.step_bytes)

    @property
    def step_bytes(self) -> int:
        """What the engine leaves for a step to work in."""
        engine = EngineConfig()
        return self.model.step.largest_bytes(cache_plan.step_tokens(engine), engine.max_batch)

    def sequence_bytes(self, bits: KVBits | None = None) -> int:
        """Cache of one user, in these bits or the setting's."""
        bits = self.bits if bits is None else bits
        return estimates.sequence_bytes(self.model.specs, self.context_tokens, self.itemsize, bits)


class Figure(NamedTuple):
    """A number: for scripts by name and value, for people by label and text.

    formula: how it is made, in words and signs. numbers: the same with the values put in.
    """

    name: str
    label: str
    value: float
    text: str
    formula: str
    numbers: str = ""


def setting(
    model: PlannedModel, asked: Mapping[str, Any], kv_bits: tuple[int, int] | None
) -> Setting:
    """What was asked, with this machine's and the model's own values for what wasn't.

    Raises RequestError for a context that the model doesn't have, and for packed bits where no
    layer's cache can be packed.
    """
    context = asked.get("context", min(USEFUL_CONTEXT_TOKENS, model.context_tokens))
    if context > model.context_tokens:
        raise RequestError(
            f"--context is {context:,}, and {model.name} was made for {model.context_tokens:,} "
            "tokens; ask for no more"
        )
    itemsize = 2 if device.has_metal() and not model.float32 else 4
    bits = UNPACKED
    if kv_bits is not None:
        bits = KVBits.of(*kv_bits)
        itemsize = 2 if 16 in kv_bits else itemsize
    if bits and not any(spec.packs for spec in model.specs):
        raise RequestError(
            f"--kv-bits is {bits_name(bits, itemsize)}, and {model.name} keeps nothing that can be "
            "packed; leave it out, or write 16"
        )
    memory_bytes = int(asked["memory"] * 2**30) if "memory" in asked else device_limit_bytes()
    return Setting(model, context, asked.get("users", 1), itemsize, bits, memory_bytes)


def sections(at: Setting, asked: Mapping[str, Any]) -> dict[str, list[Figure]]:
    """The figures by heading; those of options that weren't given are left out."""
    found = {
        "Cache": cache(at),
        MEMORY: [*needs(at), *_room(at)],
        "Speed": [*_decode(at, asked), *_prefill(at, asked)],
        **loads(asked),
    }
    return {heading: figures for heading, figures in found.items() if figures}


def loads(asked: Mapping[str, Any]) -> dict[str, list[Figure]]:
    """The sections that are of the load and its price alone, empty ones too."""
    return {
        "Requests": list(_requests(asked)),
        "Speculation": list(_speculation(asked)),
        "Cost": [*_cost(asked), *_break_even(asked)],
    }


def cache(at: Setting) -> list[Figure]:
    """What is kept, by kind of layer, per token and per user."""
    return [*_layers(at), *_cache(at)]


def _layers(at: Setting) -> Iterator[Figure]:
    """What one user's sequence takes in each kind of layer, hot pages left out."""
    for index, (spec, count) in enumerate(Counter(at.model.specs).items()):
        layers = f"{count} layer{'s' if count > 1 else ''}"
        name = f"layers_{index}_bytes"
        if isinstance(spec, State):
            one = state_bytes(spec)
            shapes = " + ".join(" * ".join(map(str, shape)) for shape in spec.shapes)
            yield Figure(
                name,
                f"{layers}, a state",
                count * one,
                f"{size(count * one)} at any length",
                "layers * numbers * bytes",
                f"{count} * ({shapes}) * {STATE_ITEMSIZE}",
            )
            continue
        pages = estimates.sealed_pages(spec, at.context_tokens)
        page = page_bytes(spec, at.itemsize, at.bits)
        total = count * pages * page
        yield Figure(
            name,
            f"{layers}, {_kind(spec)}",
            total,
            f"{size(total)} at {at.context_tokens:,} tokens, {size(count * page / PAGE_TOKENS)} "
            "per token",
            f"layers * sealed pages * bytes of a page ({PAGE_TOKENS} tokens)",
            f"{count} * {pages:,} * ({_page_formula(spec, at)})",
        )


def _kind(spec: PagedSpec) -> str:
    if isinstance(spec, Latent):
        return f"latents of {spec.rank} + {spec.rope_dim}"
    seen = "all tokens" if spec.window is None else f"last {spec.window:,} tokens"
    first = f" and first {spec.keep:,}" if spec.keep else ""
    return f"{spec.heads} x {spec.dim}, {seen}{first}"


def _page_formula(spec: PagedSpec, at: Setting) -> str:
    """`cache.spec.page_bytes` with its values: keys + values."""
    plain = f"{PAGE_TOKENS} * {spec.heads} * {spec.dim} * {at.itemsize}"
    if isinstance(spec, Latent):
        return plain
    keys = values = plain
    if at.bits.keys:
        keys = f"{spec.heads} * {spec.dim} * ({PAGE_TOKENS} * {at.bits.keys} / 8 + 4)"
    if at.bits.values:
        groups = -(-spec.dim // VALUE_GROUP)
        each = f"({VALUE_GROUP} * {at.bits.values} / 8 + 4)"
        values = f"{PAGE_TOKENS} * {spec.heads} * {groups} * {each}"
    return f"{keys} + {values}"


def _cache(at: Setting) -> Iterator[Figure]:
    specs = at.model.specs
    each = token_bytes(specs, at.itemsize, at.bits)
    yield Figure(
        "token_bytes",
        "per token",
        each,
        f"{size(each)} ({bits_name(at.bits, at.itemsize)} bits), while no window is full",
        f"sum over layers of bytes of a page / {PAGE_TOKENS}",
        f"{each * PAGE_TOKENS:,.0f} / {PAGE_TOKENS}",
    )
    sealed = estimates.sealed_bytes(specs, at.context_tokens, at.itemsize, at.bits)
    hot = estimates.hot_bytes(specs, at.itemsize)
    states = estimates.states_bytes(specs)
    yield Figure(
        "sequence_bytes",
        "per user",
        at.sequence_bytes(),
        f"{size(at.sequence_bytes())}, {size(hot)} of it in {estimates.HOT_PAGES} hot pages",
        "sealed pages + hot pages, which are being written + states",
        f"{size(sealed)} + {size(hot)} + {size(states)}",
    )


def needs(at: Setting) -> Iterator[Figure]:
    """What has to be held, on one machine or on several."""
    weights, load = at.model.weight_bytes, at.users * at.sequence_bytes()
    yield Figure(
        "weight_bytes",
        "weights",
        weights,
        size(weights) + (", counted from the config: no files are here" * at.model.counted),
        "bytes of all weights, in the form that this device computes with",
    )
    yield Figure(
        "load_bytes",
        "cache",
        load,
        f"{size(load)} for {at.users:,} x {at.context_tokens:,} tokens",
        "users * cache of a user",
        f"{at.users:,} * {size(at.sequence_bytes())}",
    )
    yield Figure(
        "total_bytes",
        "together",
        weights + load,
        size(weights + load),
        "weights + cache",
        f"{size(weights)} + {size(load)}",
    )


def _room(at: Setting) -> Iterator[Figure]:
    weights, load = at.model.weight_bytes, at.users * at.sequence_bytes()
    engine, share = EngineConfig(), 1 - SPARE_FRACTION
    tokens, rows = cache_plan.step_tokens(engine), engine.max_batch
    beside = max(0, share * (at.memory_bytes - weights) - at.room_bytes)
    yield Figure(
        "step_bytes",
        "a step",
        at.step_bytes,
        f"{size(at.step_bytes)} for {tokens} tokens and {rows} rows, at the most",
        "results of layers that exist at once, and logits",
    )
    yield Figure(
        "room_bytes",
        "room for the cache",
        at.room_bytes,
        f"{size(at.room_bytes)} of {size(at.memory_bytes)} of memory",
        f"{share} * (memory - weights) - the larger of a step, with what its attention gathers, "
        "and a copy of the largest array, which grows",
        f"{share} * ({size(at.memory_bytes)} - {size(weights)}) - {size(beside)}",
    )
    yield Figure(
        "fits",
        "fits",
        load <= at.room_bytes,
        _verdict(at, load),
        "cache <= room for the cache",
        f"{size(load)} <= {size(at.room_bytes)}",
    )


def _verdict(at: Setting, load: int) -> str:
    if load <= at.room_bytes:
        return "yes"
    if at.room_bytes == 0:
        return "NO: the weights and a step leave no room; take a smaller model or quantisation"
    return f"NO: the cache is {size(load - at.room_bytes)} too large"


def bits_name(bits: KVBits, itemsize: int) -> str:
    """As it is written for --kv-bits: `8`, `8/4`, and `32` for what a CPU computes in."""
    keys, values = bits.keys or 8 * itemsize, bits.values or 8 * itemsize
    return str(keys) if keys == values else f"{keys}/{values}"


def _decode(at: Setting, asked: Mapping[str, Any]) -> Iterator[Figure]:
    if "bandwidth" not in asked:
        return
    bandwidth, weights = asked["bandwidth"] * 1e9, at.model.weight_bytes
    cache = estimates.read_bytes(at.model.specs, at.context_tokens, at.itemsize, at.bits)
    for users in sorted({1, at.users}):
        rate = estimates.decode_tokens_per_s(weights, bandwidth, cache, users)
        each = f", {rate / users:,.1f} each" if users > 1 else ""
        yield Figure(
            "batch_tokens_per_s" if users > 1 else "solo_tokens_per_s",
            f"all {users:,} together" if users > 1 else "one user alone",
            rate,
            f"at most {rate:,.1f} tokens/s{each}, at {at.context_tokens:,} tokens",
            "users * bandwidth / (weights + users * cache read for a user)",
            f"{users:,} * {asked['bandwidth']:g} GB/s / ({size(weights)} + {users:,} * "
            f"{size(cache)})",
        )


def _prefill(at: Setting, asked: Mapping[str, Any]) -> Iterator[Figure]:
    if "tflops" not in asked:
        return
    tokens, mfu = asked.get("prompt_tokens", at.context_tokens), asked.get("mfu", 0.5)
    took = estimates.prefill_s(at.model.parameters, tokens, asked["tflops"] * 1e12, mfu)
    yield Figure(
        "prefill_s",
        "prompt",
        took,
        f"{seconds(took)} for {tokens:,} tokens",
        "2 * parameters * tokens / (FLOP/s * share of the peak)",
        f"2 * {at.model.parameters:,} * {tokens:,} / ({asked['tflops']:g}e12 * {mfu:g})",
    )


def _requests(asked: Mapping[str, Any]) -> Iterator[Figure]:
    if "latency" not in asked:
        return
    rate, latency = asked["requests_per_s"], asked["latency"]
    count = estimates.requests_in_flight(rate, latency)
    yield Figure(
        "requests_in_flight",
        "in flight",
        count,
        f"{count:,.1f} requests on average",
        "requests/s * latency (Little's law)",
        f"{rate:g} * {latency:g} s",
    )


def _speculation(asked: Mapping[str, Any]) -> Iterator[Figure]:
    if "accept_rate" not in asked:
        return
    alpha, gamma = asked["accept_rate"], asked["draft_tokens"]
    gain = estimates.tokens_per_pass(alpha, gamma)
    yield Figure(
        "tokens_per_pass",
        "per pass",
        gain,
        f"{gain:.2f} tokens of the model's, drafting left out",
        "(1 - accept rate^(draft tokens + 1)) / (1 - accept rate)",
        f"(1 - {alpha:g}^{gamma + 1}) / (1 - {alpha:g})" if alpha < 1 else f"{gamma} + 1",
    )


def _cost(asked: Mapping[str, Any]) -> Iterator[Figure]:
    if "hourly" not in asked:
        return
    hourly, used = asked["hourly"], asked.get("utilisation", 1.0)
    overhead = asked.get("overhead", 0.0)
    for given, name, unit, units in (
        ("tokens_per_s", "million_tokens_cost", "tokens", 10**6),
        ("requests_per_s", "thousand_requests_cost", "requests", 10**3),
    ):
        if given in asked:
            cost = estimates.unit_cost(hourly, asked[given], units, used, overhead)
            yield Figure(
                name,
                f"{units:,} {unit}",
                cost,
                f"${cost:,.3f}",
                f"hourly / (3600 * {unit}/s * utilisation) * {unit} * (1 + overhead)",
                f"${hourly:g} / (3600 * {asked[given]:g} * {used:g}) * {units:,} * "
                f"(1 + {overhead:g})",
            )


def _break_even(asked: Mapping[str, Any]) -> Iterator[Figure]:
    if "fixed_monthly" not in asked:
        return
    fixed, bought, own = asked["fixed_monthly"], asked["api_price"], asked["own_price"]
    tokens = estimates.break_even_tokens(fixed, bought, own)
    yield Figure(
        "break_even_tokens_per_month",
        "break even",
        tokens,
        f"at {tokens / 1e6:,.0f} million tokens a month",
        "fixed / (price of a million bought - of a million own) * 1,000,000",
        f"${fixed:,.2f} / (${bought:g} - ${own:g}) * 1,000,000",
    )


def seconds(took: float) -> str:
    """A time for people."""
    return f"{took * 1e3:.0f} ms" if took < 1 else f"{took:,.1f} s"
