"""Every error the package raises on purpose. Messages are one line: the value, then the fix."""


class MlxserveError(Exception):
    """Base of all errors below: `except mlxserve.MlxserveError` catches what we foresaw."""


class RequestError(MlxserveError, ValueError):
    """The request is wrong (a 4xx in HTTP): bad sampling values, an empty or too long prompt.

    param: where the wrong value stands, such as "top_k" or "messages[0].role"; None: not in one
    place.
    """

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ContextError(RequestError):
    """The prompt is longer than the model, or the memory here, can take; its message says how long
    it may be."""

    @classmethod
    def of(cls, tokens: int, room: int, *, at_least: bool = False) -> "ContextError":
        """tokens: of the prompt, or of which it has at least so many; room: for them."""
        least = "at least " if at_least else ""
        return cls(
            f"the prompt is too long: it has {least}{tokens} tokens, and this model can take "
            f"{room} here; shorten it",
            param="prompt",
        )


class CapacityError(MlxserveError):
    """The request is fine but there is no room for it now (429 or 503 in HTTP)."""


class ModelError(MlxserveError):
    """The model can't be found, read or run: missing files, damaged weights, unknown config."""


class DamagedError(ModelError):
    """A file isn't what its writer wrote: cut short, or with other bytes."""


class InvariantError(MlxserveError):
    """A broken promise inside the engine: a bug. The engine stops rather than answer wrongly."""


class EngineDead(MlxserveError):  # noqa: N818 (a state, not a mistake)
    """The engine has stopped; its message says why. Load the model again."""


class PeerLost(MlxserveError):  # noqa: N818 (an event, not a mistake)
    """Another process that computes a part of the model is gone; none can go on without it."""
