"""`mlxserve plan`: what a model needs and what a machine can give, before anything is loaded."""

from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, cast

import typer

from mlxserve import config
from mlxserve.cli import options, terminal
from mlxserve.engine import estimates
from mlxserve.errors import ModelError, RequestError

if TYPE_CHECKING:
    from mlxserve.cli.plan_figures import PlannedModel

EPILOG = """\b
Examples:
  mlxserve plan OWNER/NAME --context 8192 --users 16 --memory 24
  mlxserve plan ./my-model --kv-bits 8/4 --bandwidth 400 --explain
  mlxserve plan OWNER/NAME --hosts 64,64,36 --bandwidth 400 --link rdma
  mlxserve plan ./my-model --hourly 3 --tokens-per-s 2500 --utilisation 0.4
"""

_CACHE, _SPEED, _LOAD = "Cache and memory", "Speed", "Requests"
_DRAFTS, _COST, _EVEN = "Speculation", "Cost", "Own machine or a bought service"


class _Option(NamedTuple):
    """An option that is a number. needs: it is of no use without one of these."""

    check: Callable[[str, Any], None]
    metavar: str
    panel: str
    help: str
    needs: tuple[str, ...] = ()


_natural, _positive = estimates.check_at_least_1, estimates.check_above_zero
_share, _zero_or_more = estimates.check_share, estimates.check_not_negative
_OPTIONS = {
    "context": _Option(
        _natural, "N", _CACHE, "Tokens of each user. [default: 8192, or the model's]"
    ),
    "users": _Option(_natural, "N", _CACHE, "Sequences in the cache at once. [default: 1]"),
    "memory": _Option(_positive, "GIB", _CACHE, "For the model. [default: what is free here]"),
    "bandwidth": _Option(_positive, "GB/S", _SPEED, "Of memory; it bounds new tokens."),
    "tflops": _Option(_positive, "X", _SPEED, "The machine's peak; it bounds prompts."),
    "mfu": _Option(_share, "X", _SPEED, "Share of the peak. [default: 0.5]", ("tflops",)),
    "prompt_tokens": _Option(_natural, "N", _SPEED, "[default: the context]", ("tflops",)),
    "requests_per_s": _Option(
        _positive, "X", _LOAD, "Requests in a second.", ("latency", "hourly")
    ),
    "latency": _Option(_positive, "S", _LOAD, "Of a whole request.", ("requests_per_s",)),
    "accept_rate": _Option(
        estimates.check_acceptance, "X", _DRAFTS, "Of drafted tokens, 0 to 1.", ("draft_tokens",)
    ),
    "draft_tokens": _Option(_natural, "N", _DRAFTS, "Tokens of a draft.", ("accept_rate",)),
    "hourly": _Option(_positive, "$", _COST, "Of the machine.", ("tokens_per_s", "requests_per_s")),
    "tokens_per_s": _Option(_positive, "X", _COST, "Over all users, while busy.", ("hourly",)),
    "utilisation": _Option(_share, "X", _COST, "Share of time busy. [default: 1]", ("hourly",)),
    "overhead": _Option(_zero_or_more, "X", _COST, "0.3 adds 30%. [default: 0]", ("hourly",)),
    "fixed_monthly": _Option(_positive, "$", _EVEN, "Paid for any use.", ("api_price",)),
    "api_price": _Option(_positive, "$", _EVEN, "Of a million bought tokens.", ("own_price",)),
    "own_price": _Option(_zero_or_more, "$", _EVEN, "Of a million own.", ("fixed_monthly",)),
}


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _takes_numbers(command: Callable[..., None]) -> Callable[..., None]:
    """Give the command the options above; it gets those that were given, checked, as `asked`."""

    @wraps(command)
    def run(**values: Any) -> None:
        asked = {name: values.pop(name) for name in _OPTIONS}
        command(asked=_checked(asked), **values)

    table: dict[str, tuple[Any, Any]] = {}
    for name, option in _OPTIONS.items():
        whole = option.check is _natural
        declared = typer.Option(
            _flag(name),
            parser=options.whole if whole else options.number,
            metavar=option.metavar,
            rich_help_panel=option.panel,
            help=option.help,
        )
        table[name] = Annotated[int | None if whole else float | None, declared], None
    run.__signature__ = options.signature(command, "asked", table)  # type: ignore[attr-defined]
    return run


def _checked(values: Mapping[str, Any]) -> dict[str, Any]:
    """What was given. Raises RequestError for a wrong number, and for one without its mate."""
    asked = {name: value for name, value in values.items() if value is not None}
    for name, value in asked.items():
        _OPTIONS[name].check(_flag(name), value)
    for name, value in asked.items():
        option = _OPTIONS[name]
        if option.needs and not any(other in asked for other in option.needs):
            needed = " or ".join(map(_flag, option.needs))
            raise RequestError(f"{_flag(name)} is {value:g} without {needed}; give that too")
    if "api_price" in asked and asked["api_price"] <= asked["own_price"]:
        raise RequestError(
            f"--own-price is {asked['own_price']:g} and --api-price is {asked['api_price']:g}; "
            "making tokens pays only where it is the cheaper of the two"
        )
    return asked


@_takes_numbers
def plan(
    model: options.ModelArgument,
    asked: dict[str, Any],
    kv_bits: Annotated[
        str | None,
        typer.Option(
            "--kv-bits",
            metavar="BITS",
            rich_help_panel=_CACHE,
            help="16, 8, 4 or KEYS/VALUES. [default: as computed here]",
        ),
    ] = None,
    hosts: Annotated[
        str | None,
        typer.Option(
            "--hosts",
            metavar="GIB,GIB",
            rich_help_panel=_CACHE,
            help="Of each of several Macs that share the model, in place of --memory.",
        ),
    ] = None,
    link: Annotated[
        list[str] | None,
        typer.Option(
            "--link",
            metavar="NAME",
            rich_help_panel=_SPEED,
            help="Between the hosts: ethernet, 10g, thunderbolt, rdma or MS/GBIT. Repeatable. "
            "[default: each of the four]",
        ),
    ] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Show each number's formula.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="For scripts: one JSON object.")] = False,
) -> None:
    """Work out what a model needs, and what a machine can give it.

    Cache and memory are always told; speed, requests, speculation and cost where their options are
    given. Speeds are bounds. A model that isn't here is not downloaded: its config and the sizes of
    its files are enough.
    """
    terminal.end_on_broken_pipe()
    name = terminal.check_text("MODEL", model)
    bits = None if kv_bits is None else config.kv_bits(kv_bits)
    from mlxserve.cli.plan_figures import setting
    from mlxserve.cli.plan_hosts import parse_hosts
    from mlxserve.cli.plan_links import parse_links
    from mlxserve.cli.plan_report import show

    memories = () if hosts is None else parse_hosts(hosts)
    links = parse_links(link or [])
    if link and not (memories and ("bandwidth" in asked or "tflops" in asked)):
        needed = "--bandwidth or --tflops" if memories else "--hosts"
        raise RequestError(f"--link is {link[0]!r} without {needed}; give that too")
    if memories and "memory" in asked:
        raise RequestError(
            f"--memory is {asked['memory']:g} beside --hosts, which has the memory of each; "
            "leave it out"
        )
    at = setting(_read(name), asked, bits)
    show(at, asked, memories, links, explain=explain, as_json=as_json)


def _read(name: str) -> "PlannedModel":
    """The model as far as its config and its files' sizes tell. Raises ModelError."""
    import mlx.nn as nn

    from mlxserve import device
    from mlxserve.cli.plan_figures import PlannedModel
    from mlxserve.engine import footprint
    from mlxserve.kernels import matmul
    from mlxserve.models import registry
    from mlxserve.models.activations import step_shape

    found, file_bytes, elements = _find(name)
    built = registry.build(found)
    parameters = footprint.loaded_bytes(found, 0, form="float32") // 4
    counted = file_bytes is None
    if file_bytes is None:
        file_bytes = parameters * (4 if footprint.is_float32(found) else 2)
    return PlannedModel(
        name=name,
        kind=str(found["model_type"]),
        specs=tuple(built.layer_specs()),
        context_tokens=built.context_tokens,
        parameters=parameters,
        weight_bytes=footprint.loaded_bytes(
            found, file_bytes, form=matmul.form(), elements=elements
        ),
        counted=counted,
        float32=footprint.is_float32(found),
        width=found["hidden_size"],
        parts=footprint.parts_of(cast(nn.Module, built), len(built.layer_specs())),
        step=step_shape(built, footprint.activation_dtype(found, metal=device.has_metal())),
    )


def _find(name: str) -> tuple[Mapping[str, Any], int | None, Mapping[str, int]]:
    """Config, bytes of the weight files (None: they aren't there), and elements of a GGUF file."""
    from mlxserve.sources import hub, hub_fetch, resolve
    from mlxserve.sources.catalog import CATALOG
    from mlxserve.sources.checkpoint import open_checkpoint
    from mlxserve.sources.pull import installed, unknown

    if name in CATALOG:
        path = next((model.path for model in installed() if model.name == name), None)
        if path is None:
            raise ModelError(f"{name} isn't here; `mlxserve pull {name}` fetches it")
    elif (path := resolve.local_path(name)) is None:
        ref = resolve.hub_ref(name)
        if ref is None:
            raise unknown(name)
        path = hub.find(ref)
        if path is None:
            new = hub.look_up(ref)
            found, elements = hub_fetch.read_config(new)
            return found, new.weight_bytes, elements
    if path.is_dir() and not any(path.glob("*.safetensors")):
        return _config_alone(path), None, {}
    checkpoint = open_checkpoint(path)
    return checkpoint.config, checkpoint.size_bytes, checkpoint.elements


def _config_alone(path: Path) -> Mapping[str, Any]:
    """The config of a directory without weights. Raises ModelError where it doesn't tell all."""
    from mlxserve.sources import directory

    found = directory.read_config(path)
    if found.get("quantization") or found.get("quantization_config"):
        raise ModelError(
            f"{path}: the config is of quantised weights, and only the weights tell their size; "
            "download them too, or take the config of the model they were made from"
        )
    return found
