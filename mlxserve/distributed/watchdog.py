"""Notices a step that never ends: a collective waits for ever where nothing passes between ranks,
though each of them lives and says so."""

import threading
import time
from collections import deque
from collections.abc import Callable

PATIENCE = 3  # times the seconds that a rank may be silent, for any step
SLACK = 10  # times what its tokens took lately, beside that
FIRST_TOKEN_S = 1.0  # taken for what a token takes, while nothing is known
WEIGHT = 1 / 8  # of the last step in what is known
CHECKS = 4  # within the time that a rank may be silent


class Watchdog:
    """Knows the steps that are under way. `begin` and `end` are called by the engine's thread.

    timeout_s: how long a rank may be silent. on_stuck: called once, on a thread of the watchdog's
    own, with how long a step has taken.

    No limit of its own is right for steps of a token on a Mac and of 128 tokens of a large model on
    an old CPU. So what is allowed grows with a step's tokens, by the time that they took lately:
    what a step takes beside that (its weights are read) is less than a token alone takes.
    """

    def __init__(self, timeout_s: float, on_stuck: Callable[[str], None]) -> None:
        self._timeout_s = timeout_s
        self._on_stuck = on_stuck
        self._tokens: deque[int] = deque()  # of steps under way, the oldest first
        self._since_s = 0.0  # when that one began
        self._token_s: float | None = None
        self._lock = threading.Lock()
        self._over = threading.Event()
        threading.Thread(target=self._watch, name="mlxserve-watchdog", daemon=True).start()

    def begin(self, tokens: int) -> None:
        """A step of so many tokens was told; it ends after those before."""
        with self._lock:
            if not self._tokens:
                self._since_s = time.monotonic()
            self._tokens.append(tokens)

    def end(self) -> None:
        """The oldest step under way is over."""
        with self._lock:
            now_s = time.monotonic()
            took_s = (now_s - self._since_s) / self._tokens.popleft()
            known_s = took_s if self._token_s is None else self._token_s
            self._token_s = known_s + WEIGHT * (took_s - known_s)
            self._since_s = now_s

    def close(self) -> None:
        self._over.set()

    def allowed_s(self, tokens: int) -> float:
        """How long a step of so many tokens may take."""
        token_s = FIRST_TOKEN_S if self._token_s is None else self._token_s
        return PATIENCE * self._timeout_s + SLACK * tokens * token_s

    def _watch(self) -> None:
        while not self._over.wait(self._timeout_s / CHECKS):
            with self._lock:
                if not self._tokens:
                    continue
                spent_s = time.monotonic() - self._since_s
                # All of them: in a pipeline, younger steps go through this rank before the oldest
                # is read.
                stuck = spent_s > self.allowed_s(sum(self._tokens))
            if stuck:
                self._on_stuck(f"a step isn't over after {spent_s:.0f} s")
                return
