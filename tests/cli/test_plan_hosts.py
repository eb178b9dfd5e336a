"""`mlxserve plan --hosts`: shares of a model on several Macs, against figures made by hand."""

import json
import math

import pytest

from tests.engine.test_footprint import LLAMA_8B

GIB = 2**30
VOCABULARY = 128256 * 4096
LAYER = 218_112_000  # parameters: 41,943,040 of attention, 176,160,768 of the MLP and two norms
ATTENTION = 2 * 4096 * 4096 + 2 * 1024 * 4096
WHOLE = 32 * LAYER + 2 * VOCABULARY + 4096
LOAD = 16 * (GIB + 2 * 64 * 128 * 1024)
OPTIONS = ("--users", "16", "--kv-bits", "16", "--hosts")


@pytest.fixture
def planned(here, tmp_path):
    """Run it on Llama 3 8B with changes, without weights."""

    def run(*args, **changes):
        (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B | changes))
        return here("plan", str(tmp_path), *args)

    return run


@pytest.fixture
def told(planned):
    def run(*args, **changes):
        done = planned(*args, "--json", **changes)
        assert (done.code, done.stderr) == (0, "")
        return json.loads(done.stdout)

    return run


def test_equal_hosts(told):
    plan = told(*OPTIONS, "24,24", "--bandwidth", "100")
    assert "by_kv_bits" not in plan
    tensor, pipeline = plan["by_host"]["tensor"], plan["by_host"]["pipeline"]
    for host in tensor:
        assert host["weight_bytes"] == WHOLE  # of 2 bytes each, a half
        assert host["load_bytes"] == LOAD // 2
        assert host["memory_bytes"] == 24 * GIB
    assert [host["layers"] for host in pipeline] == [15, 17]
    assert pipeline[0]["weight_bytes"] == 2 * (15 * LAYER + 2 * VOCABULARY + 4096)
    assert pipeline[1]["weight_bytes"] == 2 * 17 * LAYER
    assert sum(host["load_bytes"] for host in pipeline) == LOAD
    assert plan["hosts"]["tensor_fits"] is plan["hosts"]["pipeline_fits"] is True
    read = GIB  # of one user's cache
    # In two parts: each host reads its weights twice.
    busiest = max(2 * h["weight_bytes"] + 16 * read * h["layers"] / 32 for h in pipeline)
    assert plan["speed"] == pytest.approx(
        {
            "tensor_solo_tokens_per_s": 100e9 / (WHOLE + read / 2),
            "tensor_batch_tokens_per_s": 16 * 100e9 / (WHOLE + 8 * read),
            "pipeline_solo_tokens_per_s": 100e9 / (2 * WHOLE + read),
            "pipeline_batch_tokens_per_s": 16 * 100e9 / max(2 * WHOLE + 8 * read, busiest),
        },
        rel=1e-3,
    )


def test_a_model_too_large_for_one_mac_fits_on_two(planned, told):
    assert not told("--memory", "14")["memory"]["fits"]
    text = planned("--hosts", "14,14").stdout
    lines = {" ".join(line.split()) for line in text.splitlines()}
    assert {"tensor, fits yes", "pipeline, fits yes"} <= lines
    assert max(map(len, text.splitlines()[1:])) <= 80


def test_a_small_mac_gets_fewer_layers(told):
    hosts = told(*OPTIONS, "32,16")["by_host"]
    large, small = hosts["pipeline"]
    assert large["layers"] + small["layers"] == 32
    assert 1.7 < large["layers"] / small["layers"] < 2.3
    assert hosts["tensor"][0]["weight_bytes"] == hosts["tensor"][1]["weight_bytes"]
    assert [host["fits"] for host in hosts["tensor"]] == [True, False]
    assert [host["fits"] for host in hosts["pipeline"]] == [True, True]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "hosts", "kept", "share"),
    [
        (32, 8, 3, 3, 3 / 8),  # one has three of the eight heads
        (9, 3, 2, 2, 2 / 3),
        (4, 1, 3, 1, 2 / 4),  # each has the one head, and one has two of its four query heads
        (32, 8, 16, 1, 2 / 32),
    ],
)
def test_heads_that_do_not_divide(told, heads, kv_heads, hosts, kept, share):
    changes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": 128}
    memories = ",".join(["64"] * hosts)
    plan = told("--kv-bits", "16", "--hosts", memories, **changes)
    attention = 32 * 2 * 4096 * 128 * (heads + kv_heads)
    expected = attention * share + (plan["parameters"] - attention) / hosts
    for host in plan["by_host"]["tensor"]:
        assert host["weight_bytes"] == math.floor(2 * expected)
        assert host["load_bytes"] == 32 * (128 + 2) * 64 * 2 * 128 * 2 * kept


def test_an_embedding_that_is_the_head_too_is_held_once(told):
    """By the first host, which has both."""
    pipeline = told("--hosts", "24,24", tie_word_embeddings=True)["by_host"]["pipeline"]
    layers = [2 * host["layers"] * LAYER for host in pipeline]
    assert pipeline[0]["weight_bytes"] == layers[0] + 2 * (VOCABULARY + 4096)
    assert pipeline[1]["weight_bytes"] == layers[1]


def test_more_hosts_than_layers_or_heads(told, planned):
    ways = told("--hosts", "8,8,8", num_hidden_layers=2)["by_host"]
    assert list(ways) == ["tensor"]
    changes = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 128}
    assert list(told("--hosts", "8,8,8", **changes)["by_host"]) == ["pipeline"]
    done = planned("--hosts", "8,8,8", num_hidden_layers=2, **changes)
    assert done.code == 2
    assert "--hosts has 3, and" in done.stderr


def test_the_time_of_a_prompt(planned):
    text = planned("--hosts", "64,64", "--tflops", "30", "--explain").stdout
    assert f"= 2 * {WHOLE:,} * 8,192 / (2 * 30e12 * 0.5)" in text
    assert "at least 4.4 s for 8,192 tokens" in text


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--hosts", "64"], "--hosts is '64'; write the memory of each of several Macs"),
        (["--hosts", ""], "--hosts is ''; write"),
        (["--hosts", "a,b"], "--hosts is 'a,b'; write"),
        (["--hosts", "64,0"], "--hosts is 0; it must be"),
        (["--hosts", "64,nan"], "--hosts is nan; it must be"),
        (["--hosts", "64,64", "--memory", "64"], "--memory is 64 beside --hosts"),
    ],
)
def test_refusals(planned, args, words):
    done = planned(*args)
    assert (done.code, done.stdout) == (2, "")
    assert words in done.stderr
