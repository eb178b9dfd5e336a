"""The messages of a chat: what the model is sent, and how they are saved and loaded."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlxserve import files
from mlxserve.errors import RequestError

MAX_FILE_BYTES = 64 << 20
_TEXTS = ("role", "content", "reasoning_content")
_KEYS = (*_TEXTS, "interrupted")


@dataclass(slots=True)
class Conversation:
    """Questions and answers in turn, after an optional system prompt. Owned by one thread.

    messages: user and assistant by turns. An answer may have `reasoning_content`, its thinking,
    and `interrupted: true`, if it was stopped on its way.
    """

    system: str | None = None
    messages: list[dict[str, Any]] = field(default_factory=list)

    def all_messages(self) -> list[dict[str, Any]]:
        """Everything, as it is saved."""
        head = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*head, *self.messages]

    def prompt(self, question: str) -> list[dict[str, Any]]:
        """What the model is sent for its next answer.

        Thinking goes along as `reasoning_content`: templates that want it read that key.
        """
        sent = [
            {key: message[key] for key in _TEXTS if key in message}
            for message in self.all_messages()
        ]
        return [*sent, {"role": "user", "content": question}]

    def add(self, question: str, answer: str, thinking: str, *, interrupted: bool) -> None:
        """Take in a turn."""
        reply: dict[str, Any] = {"role": "assistant", "content": answer}
        if thinking:
            reply["reasoning_content"] = thinking
        if interrupted:
            reply["interrupted"] = True
        self.messages += [{"role": "user", "content": question}, reply]

    def save(self, path: Path) -> None:
        """Write all messages as a JSON array: the whole file, or an error and no change.

        Raises RequestError where that can't be done, or would overwrite what is no saved chat.
        """
        if path.exists():
            try:
                load(path)
            except RequestError:
                raise RequestError(
                    f"{path} exists and isn't a saved chat; choose another name"
                ) from None
        text = json.dumps(self.all_messages(), ensure_ascii=False, indent=1) + "\n"
        try:
            files.replace(path, text.encode(errors="replace"))
        except OSError as error:
            raise RequestError(f"{path} can't be written: {error.strerror}; try another") from None


def load(path: Path) -> Conversation:
    """A conversation as `save` wrote it. Raises RequestError for anything else."""
    try:
        with path.open("rb") as f:
            data = f.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise RequestError(f"{path} can't be read: {error.strerror}; check the name") from None
    if len(data) > MAX_FILE_BYTES:
        raise RequestError(f"{path} is over {MAX_FILE_BYTES >> 20} MiB; that is no saved chat")
    try:
        found = json.loads(data.decode())
    except (ValueError, RecursionError) as error:
        why = " ".join(str(error).split())
        raise RequestError(f"{path} isn't JSON in UTF-8: {why}; give a file of /save") from None
    if not isinstance(found, list):
        raise RequestError(f"{path} isn't a list of messages; give a file of /save")
    messages = [_message(f"{path}: messages[{i}]", entry) for i, entry in enumerate(found)]
    system = None
    if messages and messages[0]["role"] == "system":
        system = messages.pop(0)["content"]
    for i, message in enumerate(messages):
        wanted = ("user", "assistant")[i % 2]
        if message["role"] != wanted:
            at = i + (system is not None)
            raise RequestError(
                f"{path}: messages[{at}] is the {message['role']}'s and must be the {wanted}'s: "
                "after a system message, the two take turns"
            )
    if len(messages) % 2:
        raise RequestError(f"{path} ends with a question that has no answer; remove it")
    return Conversation(system, messages)


def _message(where: str, entry: object) -> dict[str, Any]:
    if not isinstance(entry, dict):
        raise RequestError(f"{where} is a {type(entry).__name__}; it must be an object")
    if entry.get("role") not in ("system", "user", "assistant"):
        raise RequestError(
            f"{where} has role {entry.get('role')!r}; it must be system, user or assistant"
        )
    for key in _TEXTS:
        value = entry.get(key, "" if key == "reasoning_content" else None)
        if not isinstance(value, str):
            raise RequestError(f"{where} has {key} {value!r}; it must be a string")
        try:
            value.encode()
        except UnicodeEncodeError:
            raise RequestError(f"{where} has half of a surrogate pair in its {key}") from None
    if not isinstance(entry.get("interrupted", False), bool):
        raise RequestError(
            f"{where} has interrupted {entry['interrupted']!r}; it must be true or false"
        )
    return {key: entry[key] for key in _KEYS if key in entry}
