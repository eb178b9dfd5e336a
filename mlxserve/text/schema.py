"""Whether a JSON schema has an instance that ends: its references may lead nowhere else."""

from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

from mlxserve.errors import RequestError
from mlxserve.report import show

Schema = Mapping[str, Any]


def check_ends(what: str, schema: Schema) -> None:
    """Raises RequestError, which calls the schema `what`, for one that no finite instance has."""
    if (ref := endless_ref(schema)) is not None:
        raise RequestError(
            f"{what} has a $ref to {show(ref)} that each instance must follow for ever; make a "
            "property on the way optional, or give it another type to choose"
        )


def endless_ref(schema: Schema) -> str | None:
    """A reference that every instance must follow for ever, such as "#", or None.

    Only references within the document are looked at. Where one can't be found, the schema counts
    as one that ends: the compiler says what is wrong with it.
    """
    # The least fixed point: a reference ends once all that it requires does.
    refs = sorted(_refs(schema))
    ends: dict[str, bool] = dict.fromkeys(refs, False)
    while more := [ref for ref in refs if not ends[ref] and _ends(target(schema, ref), ends)]:
        ends |= dict.fromkeys(more, True)
    if _ends(schema, ends):
        return None
    return next((ref for ref in refs if not ends[ref]), None)


def _refs(schema: Schema) -> set[str]:
    found, nodes = set(), [schema]
    while nodes:
        node = nodes.pop()
        children = node.values() if isinstance(node, dict) else node
        if isinstance(node, dict) and isinstance(node.get("$ref"), str):
            found.add(node["$ref"])
        nodes += [child for child in children if isinstance(child, dict | list)]
    return found


def target(schema: Schema, ref: str) -> Any:
    """What a JSON pointer (RFC 6901) in a fragment leads to, or True: anything."""
    if not ref.startswith("#"):
        return True
    node: Any = schema
    for part in unquote(ref[1:]).split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(node, dict) and name in node:
            node = node[name]
        elif isinstance(node, list) and name.isdecimal() and int(name) < len(node):
            node = node[int(name)]
        else:
            return True
    return node


def _ends(schema: Any, ends: Mapping[str, bool]) -> bool:
    """Whether some instance is finite, if references are so as `ends` has it."""
    if not isinstance(schema, dict):
        return True
    if not ends.get(schema.get("$ref", ""), True):
        return False
    if not all(_ends(part, ends) for part in _list(schema, "allOf")):
        return False
    for name in ("anyOf", "oneOf"):
        branches = _list(schema, name)
        if branches and not any(_ends(branch, ends) for branch in branches):
            return False
    if "enum" in schema or "const" in schema:
        return True
    match schema.get("type"):
        case "object":
            return _object_ends(schema, ends)
        case "array":
            return _array_ends(schema, ends)
        case _:  # another type is possible
            return True


def _object_ends(schema: Schema, ends: Mapping[str, bool]) -> bool:
    properties = schema.get("properties")
    known = properties if isinstance(properties, dict) else {}
    others = schema.get("additionalProperties", True)
    required = [name for name in _list(schema, "required") if isinstance(name, str)]
    return all(_ends(known.get(name, others), ends) for name in required)


def _array_ends(schema: Schema, ends: Mapping[str, bool]) -> bool:
    least = schema.get("minItems", 0)
    if not isinstance(least, int):
        return True
    first = _list(schema, "prefixItems")
    if not all(_ends(item, ends) for item in first[:least]):
        return False
    return least <= len(first) or _ends(schema.get("items", True), ends)


def _list(schema: Schema, name: str) -> list[Any]:
    value = schema.get(name)
    return value if isinstance(value, list) else []
