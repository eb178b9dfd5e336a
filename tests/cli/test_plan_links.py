"""`mlxserve plan --hosts --link`: steps with what hosts send each other, by hand."""

import json

import pytest

from mlxserve import device
from mlxserve.config import EngineConfig
from mlxserve.engine.cache_plan import step_tokens
from tests.engine.test_footprint import LLAMA_8B

WHOLE = 8_030_261_248  # parameters; 2 bytes each, a half on each of two hosts
CACHE = 1 << 30  # of a user
SPEED = ("--kv-bits", "16", "--hosts", "64,64", "--users", "16", "--bandwidth", "100")
ITEM = 2 if device.has_metal() else 4  # bytes of a number in activations
HIDDEN = 4096 * ITEM  # of a row
LOGITS = 128256 // 2 * ITEM  # of a row, on a host


@pytest.fixture
def planned(here, tmp_path):
    """Run it on Llama 3 8B, without weights."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    return lambda *args: here("plan", str(tmp_path), *args)


@pytest.fixture
def told(planned):
    def run(*args):
        done = planned(*args, "--json")
        assert (done.code, done.stderr) == (0, "")
        return json.loads(done.stdout)

    return run


def test_tensor_parallel(told):
    links = told(*SPEED, "--link", "2/8")["links"]  # 2 ms and a GB/s
    sums = 65 * (2e-3 + HIDDEN / 1e9)
    rest = 2e-3 + 4 / 1e9 + 2e-3 + LOGITS / 1e9
    step = (WHOLE + CACHE / 2) / 100e9 + sums + rest
    assert links["tensor_2/8_solo_step_s"] == pytest.approx(step, rel=1e-3)
    assert links["tensor_2/8_solo_tokens_per_s"] == pytest.approx(1 / step, rel=1e-3)
    sums = 65 * (2e-3 + 16 * HIDDEN / 1e9)
    rest = 2e-3 + 64 / 1e9 + 2e-3 + 16 * LOGITS / 1e9
    step = (WHOLE + 8 * CACHE) / 100e9 + sums + rest
    assert links["tensor_2/8_batch_step_s"] == pytest.approx(step, rel=1e-3)
    assert links["tensor_2/8_batch_tokens_per_s"] == pytest.approx(16 / step, rel=1e-3)


def test_a_pipeline(told):
    links = told(*SPEED, "--link", "2/8")["links"]
    step = (2 * WHOLE + CACHE) / 100e9 + 2 * (2e-3 + HIDDEN / 1e9)
    assert links["pipeline_2/8_solo_step_s"] == pytest.approx(step, rel=1e-3)
    step = (2 * WHOLE + 8 * CACHE) / 100e9 + 2 * (2e-3 + 8 * HIDDEN / 1e9)  # in two parts
    found = links["pipeline_2/8_batch_step_s"]
    assert step < found < 1.02 * step  # hosts differ, by less than a layer


def test_a_prompt_is_cut_to_steps(told):
    links = told("--hosts", "64,64", "--tflops", "10", "--prompt-tokens", "1200", "--link", "2/8")
    found, most = links["links"], step_tokens(EngineConfig())
    tokens = [min(most, 1200 - start) for start in range(0, 1200, most)]
    alone = 2 * WHOLE * 1200 / (10e12 * 0.5)
    sums = sum(65 * (2e-3 + n * HIDDEN / 1e9) + 2e-3 + n * 4 / 1e9 for n in tokens)
    logits = 2e-3 + LOGITS / 1e9
    assert found["tensor_2/8_prefill_s"] == pytest.approx(alone / 2 + sums + logits, rel=1e-3)
    hops = 2 * (2e-3 + tokens[0] * HIDDEN / 1e9)
    parts = len(tokens)
    piped = alone / parts + hops + (parts - 1) * alone / parts / 2
    assert found["pipeline_2/8_prefill_s"] == pytest.approx(piped, rel=1e-3)


def test_a_link_that_takes_no_time_leaves_the_bounds_as_they_are(told):
    plan = told(*SPEED, "--link", "1e-9/1e12")
    for way in ("tensor", "pipeline"):
        for load in ("solo", "batch"):
            rate = plan["links"][f"{way}_1e-9/1e12_{load}_tokens_per_s"]
            assert rate == pytest.approx(plan["speed"][f"{way}_{load}_tokens_per_s"], rel=1e-4)


def test_without_a_name_all_are_in_the_table(planned, told):
    args = (*SPEED, "--tflops", "30")
    lines = [line.split() for line in planned(*args).stdout.split("\nLinks\n")[1].splitlines()]
    assert " ".join(lines[1]) == ("DIVIDED BY LINK ONE USER TOKENS/S 16 USERS TOKENS/S PROMPT")
    assert [(way, link) for way, link, *_ in lines[2:]] == [
        (way, link)
        for way in ("tensor", "pipeline")
        for link in ("ethernet", "10g", "thunderbolt", "rdma")
    ]
    assert max(map(len, planned(*args).stdout.splitlines()[1:])) <= 80
    plan = told(*args)
    links = plan["links"]
    assert plan["by_link"]["rdma"]["mesh"]
    assert plan["by_link"]["10g"]["bytes_per_s"] == pytest.approx(10e9 / 8, rel=0.1)
    assert len(links) == 2 * 4 * 5
    assert links["tensor_rdma_solo_step_s"] < links["tensor_thunderbolt_solo_step_s"]
    assert links["tensor_thunderbolt_prefill_s"] < links["tensor_10g_prefill_s"]


def test_formulas(planned):
    text = planned(*SPEED, "--link", "2/8", "--explain").stdout
    assert "tensor, 2/8, step, one user alone" in text
    assert "2/8: a message = 2 ms + bytes / 8 Gbit/s, hosts are a ring" in text
    assert (
        "a sum of users * width + a sum of ids and a gather of users * vocabulary / hosts" in text
    )
    assert f"= 85.7 ms + 65 * {2 + HIDDEN / 1e6:.3g} ms + {4 + LOGITS / 1e6:.3g} ms" in text
    assert f"= max(171 ms + 2 * {2 + HIDDEN / 1e6:.3g} ms, 1 * " in text


def test_without_speeds_there_is_nothing_of_links(told):
    plan = told("--hosts", "64,64")
    assert not {"links", "speed"} & plan.keys()


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--link", "rdma"], "--link is 'rdma' without --hosts; give that too"),
        (["--link", "rdma", "--bandwidth", "400"], "--link is 'rdma' without --hosts"),
        (["--link", "rdma", "--hosts", "64,64"], "--link is 'rdma' without --bandwidth or --tflop"),
        ([*SPEED, "--link", "wifi"], "--link is 'wifi'; write one of ethernet, 10g, thunderbolt"),
        ([*SPEED, "--link", ""], "--link is ''; write one of"),
        ([*SPEED, "--link", "1/2/3"], "--link is '1/2/3'; write one of"),
        ([*SPEED, "--link", "0/40"], "--link is 0; it must be a finite number above 0"),
        ([*SPEED, "--link", "0.3/nan"], "--link is nan; it must be"),
        ([*SPEED, "--link", "rdma", "--link", "x"], "--link is 'x'; write one of"),
    ],
)
def test_refusals(planned, args, words):
    done = planned(*args)
    assert (done.code, done.stdout) == (2, "")
    assert words in done.stderr
