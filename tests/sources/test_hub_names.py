"""What is taken for a name of the Hub, and what is refused before any request."""

import pytest

from mlxserve.errors import ModelError
from mlxserve.sources.hub_names import HubRef, parse, unsafe
from tests.sources.making import one_line


@pytest.mark.parametrize(
    ("text", "ref"),
    [
        ("owner/name", HubRef("owner/name")),
        ("Qwen/Qwen3-0.6B", HubRef("Qwen/Qwen3-0.6B")),
        ("o/n@main", HubRef("o/n")),
        ("o/n@v1.0", HubRef("o/n", "v1.0")),
        ("o/n@refs/pr/3", HubRef("o/n", "refs/pr/3")),
        ("o/n@" + "a" * 40, HubRef("o/n", "a" * 40)),
        ("o/n:Q4_K_M", HubRef("o/n", quant="Q4_K_M")),
        ("o/n:Q4_K_M@v1", HubRef("o/n", "v1", quant="Q4_K_M")),
        ("o/n/model.Q8_0.gguf", HubRef("o/n", file="model.Q8_0.gguf")),
        ("o/n/sub/m.gguf@v1", HubRef("o/n", "v1", file="sub/m.gguf")),
    ],
)
def test_names(text, ref):
    assert parse(text) == ref
    assert parse(str(ref)) == ref


@pytest.mark.parametrize(
    "text",
    [
        "",
        "name",
        "/etc/passwd",
        "./a/b",
        "../a/b",
        "~a/b",
        ".a/b",
        "a/",
        "/a",
        "a//b",
        "a/b.gguf",
        "a/model.safetensors",
        "a:b/c",
        "\na/b:Q4:x",
        "\\a/b",
        "a\nb\x00",
    ],
)
def test_what_has_not_the_form_of_a_name(text):
    assert parse(text) is None


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a/..", "repo's name"),
        ("a/b..c", "repo's name"),
        ("a/b--c", "repo's name"),
        ("a/-b", "repo's name"),
        ("a/b\\c", "repo's name"),
        ("a/b\0", "repo's name"),
        ("a/b\nc", "repo's name"),
        ("a/b c", "repo's name"),
        ("a/b%2f", "repo's name"),
        ("a/" + "b" * 100, "96 characters"),
        ("a/b/../../x.gguf", "leads out"),
        ("a/b//x.gguf", "leads out"),
        ("a/b/./x.gguf", "leads out"),
        ("a/b/c\\..\\x.gguf", "leads out"),
        ("a/b/x\0.gguf", "leads out"),
        ("a/b/" + "x" * 500 + ".gguf", "leads out"),
        ("a/b/c", "no .gguf file"),
        ("a/b/pytorch_model.bin", "no .gguf file"),
        ("a/b@../../x", "revision"),
        ("a/b@/x", "revision"),
        ("a/b@x/", "revision"),
        ("a/b@x//y", "revision"),
        ("a/b@-x", "revision"),
        ("a/b@x y", "revision"),
        ("a/b@x\0", "revision"),
        ("a/b@x\\y", "revision"),
        ("a/b@v1:Q4_K_M", ":QUANT comes before @revision"),
        ("a/b:Q4-K", "quantisation"),
        ("a/b:Q4 K", "quantisation"),
    ],
)
def test_bad_names_say_what_is_wrong(text, why):
    with pytest.raises(ModelError) as e:
        parse(text)
    assert one_line(e.value, why, "owner/name"), str(e.value)


@pytest.mark.parametrize(
    "name",
    ["../x", "/x", "a/../x", "a//x", "./x", "", "a/", "a\\b", "C:/x", "x\0", "x\n", "x\u202e"],
)
def test_file_names_that_lead_elsewhere(name):
    assert unsafe(name)


@pytest.mark.parametrize("name", ["x", "a/b.json", "a b", "..x", "x..y", "ü.gguf", "a/C:x"])
def test_file_names_that_do_not(name):
    assert not unsafe(name)
