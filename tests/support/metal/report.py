"""What the emulator finds wrong with a kernel, in words."""

import re
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

from mlxserve.kernels.metal.launch import Kernel

_MESSAGE = re.compile(r"([^\n:]*):(\d+):\d+: (?:fatal )?(error|warning|note): ([^\n]*)")


@dataclass(frozen=True, slots=True)
class Finding:
    """One fault.

    kind: such as "threadgroup-race"; where: "NAME.source:LINE" or "NAME.header:LINE", "" if
    unknown; code: that line; other: the place of the access that this one conflicts with, or "";
    threadgroup, thread: positions of the first thread that had it, or None.
    """

    kind: str
    message: str
    where: str = ""
    code: str = ""
    other: str = ""
    threadgroup: tuple[int, ...] | None = None
    thread: tuple[int, ...] | None = None

    def __str__(self) -> str:
        text = f"[{self.kind}] {self.message}"
        if self.where:
            text += f"\n    {self.where}: {self.code}"
        if self.other:
            text += f"\n    the other access: {self.other}"
        if self.threadgroup is not None:
            text += f"\n    threadgroup {self.threadgroup}, thread {self.thread}"
        return text


class KernelError(AssertionError):
    """A kernel is wrong. kinds: of its findings."""

    def __init__(self, kernel: Kernel, findings: list[Finding]) -> None:
        self.findings = findings
        self.kinds = {finding.kind for finding in findings}
        lines = "\n".join(str(finding) for finding in findings)
        super().__init__(f"the Metal kernel {kernel.name!r}:\n{lines}")


def source_file(kernel: Kernel) -> str:
    """The file name that a kernel's source has in messages."""
    return f"{kernel.name}.source"


def header_file(kernel: Kernel) -> str:
    """The file name that a kernel's header has in messages."""
    return f"{kernel.name}.header"


def code_at(kernel: Kernel, where: str) -> str:
    """The line of a kernel at "FILE:LINE", or ""."""
    file, _, line = where.partition(":")
    texts = {source_file(kernel): kernel.source, header_file(kernel): kernel.header}
    lines = texts.get(file, "").splitlines()
    # The compiler may have lost the line, of code that it has merged.
    return lines[int(line) - 1].strip() if line.isdigit() and 0 < int(line) <= len(lines) else ""


def compiler_findings(kernel: Kernel, printed: str) -> list[Finding]:
    """The errors and warnings that clang printed about a kernel, each with its first note."""
    found: list[Finding] = []
    noted = True
    for file, line, severity, message in _MESSAGE.findall(printed):
        if severity != "note":
            where = f"{Path(file).name}:{line}"
            found.append(Finding("compile", message, where, code_at(kernel, where)))
            noted = False
        elif not noted:
            found[-1] = replace(found[-1], message=f"{found[-1].message}: {message}")
            noted = True
    return found


def places(kernel: Kernel, library: Path, addresses: set[int]) -> dict[int, str]:
    """ "FILE:LINE" in the kernel's own text of each return address in a compiled library."""
    if not addresses:
        return {}
    ordered = sorted(addresses)
    # A return address lies behind its call, so the byte before is asked for.
    asked = [hex(address - 1) for address in ordered]
    command = ["addr2line", "--addresses", "--inlines", "--exe", str(library), *asked]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found: dict[int, str] = {}
    files = (source_file(kernel), header_file(kernel))
    current = 0
    for line in printed.splitlines():
        if line.startswith("0x"):
            current = int(line, 16) + 1
            continue
        # Frames come innermost first: the first one outside of our own headers is meant.
        place = line.split(" ")[0].rsplit("/", 1)[-1]
        if place.rpartition(":")[0] in files:
            found.setdefault(current, place)
    return found
