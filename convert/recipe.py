"""How each matrix is quantised: one scheme for all, or by rules that a small TOML file holds.

about = "8 bits where it matters most"   # optional

[default]                # bits, group_size and mode; what is missing comes from the options
bits = 4

[[rules]]                # the first rule that fits a matrix decides
match = ["*.v_proj", "*.down_proj"]      # modules' names, with * for any text
layers = ["first 1/8", "last 1/8", "every 3 after 1/8", 0, -1]     # optional: any of these
bits = 6                 # what is missing comes from the default

[[rules]]
match = "lm_head"
keep = true              # not quantised
"""

import difflib
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from mlxserve.errors import ModelError, RequestError
from mlxserve.files import read_text
from mlxserve.report import one_line, show
from mlxserve.sources.mlx_quant import KEYS, MODES, Quantised

RECIPES = Path(__file__).parent / "recipes"
HEAD = "lm_head"
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_SELECTOR = re.compile(
    r"(first|last) (\d{1,4})(?:/(\d{1,4}))?|every (\d{1,4}) after (\d)/(\d{1,4})"
)
_RULE_KEYS = {"match", "layers", "keep", *KEYS}
Selector = str | int


@dataclass(frozen=True, slots=True)
class Options:
    """What the user gave, None where nothing: for all that a recipe doesn't say."""

    bits: int | None = None
    group_size: int | None = None
    mode: str | None = None


@dataclass(frozen=True, slots=True)
class Rule:
    """match: patterns of modules' names; layers: which layers, all if empty; scheme: None keeps."""

    match: tuple[str, ...]
    layers: tuple[Selector, ...]
    scheme: Quantised | None

    def fits(self, module: str, n_layers: int) -> bool:
        """Whether this rule is for the module of a model with so many layers."""
        if not self.names(module):
            return False
        if not self.layers:
            return True
        layer = _LAYER.match(module)
        index = int(layer[1]) if layer else None
        return index is not None and any(_selects(s, index, n_layers) for s in self.layers)

    def names(self, module: str) -> bool:
        """Whether one of the patterns is for this name."""
        return any(fnmatchcase(module, pattern) for pattern in self.match)


@dataclass(frozen=True, slots=True)
class Recipe:
    """name: what the user called it, "" without a recipe."""

    name: str
    default: Quantised
    rules: tuple[Rule, ...] = ()

    def assign(self, modules: Sequence[str], n_layers: int) -> dict[str, Quantised | None]:
        """The scheme of each module, None for one that stays as it is.

        Raises RequestError for a rule that is for no module of this model.
        """
        known = [*modules, HEAD]  # a model with tied embeddings has none
        for rule in self.rules:
            for pattern in rule.match:
                if not any(fnmatchcase(module, pattern) for module in known):
                    raise RequestError(_unmatched(self.name, pattern, known))
        return {module: self._scheme(module, n_layers) for module in modules}

    def _scheme(self, module: str, n_layers: int) -> Quantised | None:
        for rule in self.rules:
            if rule.fits(module, n_layers):
                return rule.scheme
        return self.default


def shipped() -> list[str]:
    """The names of the recipes that come with the package."""
    return sorted(path.stem for path in RECIPES.glob("*.toml"))


def read_recipe(name: str | Path, options: Options) -> Recipe:
    """A shipped recipe by name, or one's own by the path of its file.

    What the options say replaces the recipe's default; rules keep what they say themselves. Raises
    RequestError for an unknown name, and for a file that is no recipe.
    """
    text = str(name)
    try:
        if text in shipped():
            content = read_text(RECIPES / f"{text}.toml")
        elif Path(name).is_file():
            content = read_text(Path(name))
        else:
            raise RequestError(_unknown(text))
        found = tomllib.loads(content)
    except tomllib.TOMLDecodeError as e:
        raise RequestError(f"recipe {text} is no proper TOML: {one_line(e)}") from None
    except ModelError as e:
        raise RequestError(str(e)) from None
    return _recipe(text, found, options)


def plain_recipe(options: Options) -> Recipe:
    """One scheme for all matrices. Raises RequestError for what MLX can't compute with."""
    return Recipe("", scheme("", {}, options))


def scheme(where: str, given: Mapping[str, Any], options: Options) -> Quantised:
    """The scheme of `given` keys, then of the options, then of the mode. Raises RequestError."""
    before = f"{where}: " if where else ""
    mode = given.get("mode", options.mode if options.mode is not None else "affine")
    if mode not in MODES:
        raise RequestError(
            f"{before}mode is {show(mode)}; use one of {', '.join(MODES)}",
            param=None if where else "mode",
        )
    same = options.mode is None or mode == options.mode  # another mode has other sizes
    sizes, widths = MODES[mode]
    values = {}
    for key, known in (("bits", widths), ("group_size", sizes)):
        other = getattr(options, key) if same else None
        value = given.get(key, known[0] if other is None else other)
        if type(value) is not int or value not in known:
            raise RequestError(
                f"{before}{key} is {show(value)}; {mode} takes "
                f"{', '.join(map(str, sorted(known)))}",
                param=None if where else key,
            )
        values[key] = value
    return Quantised(mode=mode, **values)


def _recipe(name: str, found: dict[str, Any], options: Options) -> Recipe:
    where = f"recipe {name}"
    _only(where, found, {"about", "default", "rules"})
    given = found.get("default", {})
    rules = found.get("rules", [])
    if not isinstance(given, dict) or not isinstance(rules, list):
        raise RequestError(f"{where}: write [default] for the default, [[rules]] for each rule")
    _only(f"{where}: default", given, set(KEYS))
    stated = {key: getattr(options, key) for key in KEYS if getattr(options, key) is not None}
    default = scheme(f"{where}: default", {**given, **stated}, options)
    base = Options(default.bits, default.group_size, default.mode)
    return Recipe(
        name, default, tuple(_rule(f"{where}: rule {i}", r, base) for i, r in enumerate(rules, 1))
    )


def _rule(where: str, given: Any, base: Options) -> Rule:
    if not isinstance(given, dict):
        raise RequestError(f"{where} is {show(given)}; write [[rules]] before each rule")
    _only(where, given, _RULE_KEYS)
    match = given.get("match")
    patterns = [match] if isinstance(match, str) else match
    if not isinstance(patterns, list) or not patterns or not all(_is_text(p) for p in patterns):
        raise RequestError(f"{where}: match is {show(match)}; give a name such as '*.v_proj'")
    layers = given.get("layers", [])
    layers = layers if isinstance(layers, list) else [layers]
    for selector in layers:
        _check_selector(where, selector)
    keep = given.get("keep", False)
    own = {key: given[key] for key in KEYS if key in given}
    if not isinstance(keep, bool) or (keep and own) or not (keep or own):
        raise RequestError(f"{where}: give either keep = true or some of {', '.join(KEYS)}")
    if "mode" in own and own["mode"] != base.mode:
        base = replace(base, bits=None, group_size=None, mode=None)
    return Rule(tuple(patterns), tuple(layers), None if keep else scheme(where, own, base))


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value != ""


def _only(where: str, given: Mapping[str, Any], known: set[str]) -> None:
    if unknown := sorted(given.keys() - known):
        close = difflib.get_close_matches(unknown[0], known, 1)
        hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(sorted(known))}"
        raise RequestError(f"{where} has {show(unknown[0])}; {hint}")


def _check_selector(where: str, selector: object) -> None:
    if type(selector) is int:
        return
    found = _SELECTOR.fullmatch(selector) if isinstance(selector, str) else None
    if found is None or any(number and int(number) == 0 for number in found.group(3, 4, 6)):
        raise RequestError(
            f"{where}: layers has {show(selector)}; write a layer's number (-1 is the last), "
            "'first 2', 'last 1/8' or 'every 3 after 1/8'"
        )


def _selects(selector: Selector, index: int, n: int) -> bool:
    """'every 3 after 1/8': the third, sixth, .. of the layers that follow the first eighth."""
    if isinstance(selector, int):
        return index == (selector if selector >= 0 else n + selector)
    found = _SELECTOR.fullmatch(selector)
    if found is None:  # checked when the recipe was read
        return False
    where, amount, parts, step, skip, of = found.groups()
    if step:
        return (index - int(skip) * n // int(of)) % int(step) == int(step) - 1
    if where == "first":
        return index < (int(amount) * n // int(parts) if parts else int(amount))
    first = (int(parts) - int(amount)) * n // int(parts) if parts else n - int(amount)
    return index >= first


def _unmatched(recipe: str, pattern: str, modules: Sequence[str]) -> str:
    ends = sorted({module.rpartition(".")[2] for module in modules})
    return (
        f"recipe {recipe}: no matrix of this model is called {show(pattern)}; its names end in "
        f"{', '.join(ends)}"
    )


def _unknown(name: str) -> str:
    known = shipped()
    close = difflib.get_close_matches(name, known, 1)
    hint = f" (did you mean {close[0]}?)" if close else ""
    return (
        f"recipe {show(name)} is unknown{hint}; give one of {', '.join(known)}, or the path of a "
        ".toml file"
    )
