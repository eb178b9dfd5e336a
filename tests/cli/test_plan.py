"""`mlxserve plan`: figures, formulas and refusals, from configs without weights."""

import json

import mlx.core as mx
import pytest

from mlxserve.cache.spec import Latent, State
from mlxserve.cli import plan_figures
from mlxserve.cli.plan_figures import PlannedModel
from mlxserve.cli.plan_report import show
from mlxserve.config import EngineConfig
from mlxserve.engine.core import Core
from mlxserve.engine.footprint import Parts, footprint
from mlxserve.errors import RequestError
from mlxserve.kernels.pages import arrays_of
from mlxserve.memory import StepShape
from mlxserve.models.load import load_model
from tests.engine.test_footprint import LLAMA_8B
from tests.support.tiny import tiny_llama

GIB = 2**30
# Of 128 tokens: results of five layers, of the embedding, and of the last norm with the sum that it
# is of; and ten times the logits of 32 rows. In float32.
LAYER = 6 * 4096 + 3 * 4096 + 3 * 1024 + 3 * 14336
STEP_BYTES = 4 * (128 * (5 * LAYER + 3 * 4096) + 10 * 32 * 128256)
EVERYTHING = [
    *("--context", "8192", "--users", "16", "--kv-bits", "16", "--memory", "80"),
    *("--bandwidth", "3350", "--tflops", "989", "--mfu", "0.5", "--prompt-tokens", "2000"),
    *("--requests-per-s", "4", "--latency", "6", "--accept-rate", "0.7", "--draft-tokens", "4"),
    *("--hourly", "3", "--tokens-per-s", "2500", "--utilisation", "0.4", "--overhead", "0.3"),
    *("--fixed-monthly", "25000", "--api-price", "2", "--own-price", "0.4"),
]


@pytest.fixture
def model(tmp_path):
    """A directory with the config of Llama 3 8B, in 16 bits, and no weights."""
    path = tmp_path / "llama-8b"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(LLAMA_8B))
    return str(path)


@pytest.fixture
def told(here):
    """The JSON of a run."""

    def run(*args):
        done = here("plan", *args, "--json")
        assert (done.code, done.stderr) == (0, "")
        return json.loads(done.stdout)

    return run


def test_every_section(told, model):
    plan = told(model, *EVERYTHING)
    weights, sequence = 8_030_261_248 * 2, GIB + 2 * 64 * 128 * 1024
    assert plan["parameters"] == 8_030_261_248
    assert (plan["context_tokens"], plan["users"], plan["kv_bits"]) == (8192, 16, "16")
    assert plan["layers"] == [{"count": 32, "kind": "FullKV", "heads": 8, "dim": 128}]
    assert plan["cache"] == {
        "layers_0_bytes": GIB,
        "token_bytes": 128 * 1024,
        "sequence_bytes": sequence,
    }
    assert plan["memory"] == {
        "weight_bytes": weights,
        "load_bytes": 16 * sequence,
        "total_bytes": weights + 16 * sequence,
        "step_bytes": STEP_BYTES,
        # The largest array, which is copied as it grows, has one of 32 layers' keys.
        "room_bytes": pytest.approx(0.95 * (80 * GIB - weights) / (1 + 1 / 64), abs=1),
        "fits": True,
    }
    assert plan["speed"] == {
        "solo_tokens_per_s": pytest.approx(3350e9 / (weights + GIB)),
        "batch_tokens_per_s": pytest.approx(16 * 3350e9 / (weights + 16 * GIB)),
        "prefill_s": pytest.approx(2 * 8_030_261_248 * 2000 / 494.5e12),
    }
    assert plan["requests"] == {"requests_in_flight": 24}
    assert plan["speculation"] == {"tokens_per_pass": pytest.approx(2.7731)}
    assert plan["cost"] == {
        "million_tokens_cost": pytest.approx(1.08333, abs=1e-5),
        "thousand_requests_cost": pytest.approx(0.67708, abs=1e-5),
        "break_even_tokens_per_month": pytest.approx(15.625e9),
    }
    assert "formulas" not in plan


def test_what_would_fit_in_other_bits(told, model):
    rows = told(model, *EVERYTHING)["by_kv_bits"]
    assert [row["kv_bits"] for row in rows] == ["16", "8", "8/4", "4"]
    assert [row["token_bytes"] for row in rows] == [131072, 71680, 55296, 38912]
    # One more user, or one more token, is too much.
    room = told(model, *EVERYTHING)["memory"]["room_bytes"]
    for row in rows:
        sequence = row["load_bytes"] / 16
        assert row["most_users"] * sequence <= room < (row["most_users"] + 1) * sequence
    for more, fits in ((0, True), (1, False)):
        longest = str(rows[0]["longest_context_tokens"] + more)
        assert told(model, *EVERYTHING, "--context", longest)["memory"]["fits"] is fits
    longest = [row["longest_context_tokens"] for row in rows]
    assert longest == sorted(longest)


@pytest.mark.parametrize("bits", [None, "16", "8/4"])
def test_the_engine_gives_the_cache_the_room_of_the_plan(told, tmp_path, bits):
    tiny = tiny_llama(max_position_embeddings=1 << 17, num_hidden_layers=3)
    (tmp_path / "config.json").write_text(json.dumps(tiny.config | {"dtype": "float32"}))
    asked = ["--memory", "0.1"] + (["--kv-bits", bits] if bits else [])
    plan = told(str(tmp_path), *asked)["memory"]
    free = int(0.1 * GIB) - plan["weight_bytes"]
    model = load_model(tiny.config, tiny.weights)
    limit = mx.get_active_memory() + free
    core = Core(model, EngineConfig(memory_limit_bytes=limit, kv_bits=bits))
    core.storage.grow(*core.storage.limits)
    held = core.storage.nbytes
    layer_page = sum(array.nbytes for side in core.storage.pool[0] for array in arrays_of(side))
    page = 3 * layer_page / core.storage.limits[1]
    assert held <= plan["room_bytes"] < held + page
    needed = footprint(
        tiny.config, 0, free, metal=False, engine=EngineConfig(kv_bits=bits), context_tokens=64
    )
    assert needed.room_tokens == min(core.storage.limits[1] * 64, model.context_tokens)


def test_sections_that_were_not_asked_for_are_left_out(told, here, model):
    plan = told(model, "--memory", "80")
    assert not {"speed", "requests", "speculation", "cost"} & plan.keys()
    assert (plan["context_tokens"], plan["users"]) == (8192, 1)
    text = here("plan", model, "--memory", "80").stdout
    headings = [line for line in text.splitlines()[1:] if line and not line.startswith(" ")]
    assert headings == ["Cache", "Memory"]


def test_for_people(here, model):
    done = here("plan", model, *EVERYTHING)
    assert (done.code, done.stderr) == (0, "")
    assert max(map(len, done.stdout.splitlines()[1:])) <= 80
    lines = {" ".join(line.split()) for line in done.stdout.splitlines()}
    assert {
        "32 layers, 8 x 128, all tokens 1.0 GiB at 8,192 tokens, 128.0 KiB per token",
        "weights 15.0 GiB, counted from the config: no files are here",
        "cache 16.2 GiB for 16 x 8,192 tokens",
        "together 31.2 GiB",
        "a step 365.1 MiB for 128 tokens and 32 rows, at the most",
        "room for the cache 60.8 GiB of 80.0 GiB of memory",
        "fits yes",
        "prompt 65 ms for 2,000 tokens",
        "in flight 24.0 requests on average",
        "per pass 2.77 tokens of the model's, drafting left out",
        "1,000,000 tokens $1.083",
        "break even at 15,625 million tokens a month",
    } <= lines
    assert not any(line.startswith("=") for line in lines)


def test_explain_shows_formulas_with_their_values(here, told, model):
    text = here("plan", model, *EVERYTHING, "--explain").stdout
    lines = {line.strip() for line in text.splitlines()}
    assert {
        "= layers * sealed pages * bytes of a page (64 tokens)",
        "= 32 * 128 * (64 * 8 * 128 * 2 + 64 * 8 * 128 * 2)",
        "= users * bandwidth / (weights + users * cache read for a user)",
        "= 2 * 8,030,261,248 * 2,000 / (989e12 * 0.5)",
        "= requests/s * latency (Little's law)",
        "= (1 - 0.7^5) / (1 - 0.7)",
        "= $3 / (3600 * 2500 * 0.4) * 1,000,000 * (1 + 0.3)",
        "= $25,000.00 / ($2 - $0.4) * 1,000,000",
    } <= lines
    formulas = told(model, *EVERYTHING, "--explain")["formulas"]
    plan = told(model, *EVERYTHING)
    sections = ("cache", "memory", "speed", "requests", "speculation", "cost")
    assert formulas.keys() == {name for section in sections for name in plan[section]}


@pytest.mark.parametrize("bits", ["16", "8", "8/4", "4/8", "4", "16/4", "8/16"])
def test_the_formula_of_a_page_gives_its_bytes(told, model, bits):
    config = LLAMA_8B | {"head_dim": 80}
    with open(f"{model}/config.json", "w") as file:
        json.dump(config, file)
    plan = told(model, "--kv-bits", bits, "--memory", "80", "--explain")
    numbers = plan["formulas"]["layers_0_bytes"].rpartition(" = ")[2]
    assert evaluated(numbers) == plan["cache"]["layers_0_bytes"] > 0


def evaluated(text: str) -> float:
    """The value of sums, products and quotients of numbers."""
    return eval(text, {"__builtins__": {}})


def test_windows(told, here, tmp_path):
    config = LLAMA_8B | {"model_type": "mistral", "sliding_window": 1000}
    (tmp_path / "config.json").write_text(json.dumps(config))
    plan = told(str(tmp_path), "--kv-bits", "16", "--memory", "80", "--context", "100000")
    assert plan["cache"]["layers_0_bytes"] == 32 * 16 * 64 * 4096  # 999 earlier tokens: 16 pages
    assert plan["by_kv_bits"][0]["longest_context_tokens"] == 131072
    assert "last 1,000 tokens" in here("plan", str(tmp_path), "--memory", "80").stdout


def test_what_does_not_fit(here, told, model):
    assert not told(model, "--memory", "8")["memory"]["fits"]
    text = here("plan", model, "--memory", "8").stdout
    assert "NO: the weights and a step leave no room; take a smaller model" in text
    text = here("plan", model, "--memory", "16", "--kv-bits", "16").stdout
    assert "NO: the cache is 390.9 MiB too large" in text


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--context", "0"], "--context is 0; it must be a whole number of at least 1"),
        (["--context", "131073"], "was made for 131,072 tokens"),
        (["--users", "-1"], "--users is -1; it must be"),
        (["--kv-bits", "3"], "kv_bits is '3'; it must be 16, 8 or 4"),
        (["--memory", "0"], "--memory is 0; it must be"),
        (["--bandwidth", "nan"], "--bandwidth is nan; it must be"),
        (["--bandwidth", "fast"], "'fast' isn't a number"),
        (["--tflops", "inf"], "--tflops is inf; it must be"),
        (["--tflops", "1", "--mfu", "1.5"], "--mfu is 1.5; it must be above 0 and at most 1"),
        (["--mfu", "0.5"], "--mfu is 0.5 without --tflops"),
        (["--latency", "3"], "--latency is 3 without --requests-per-s"),
        (["--requests-per-s", "3"], "--requests-per-s is 3 without --latency or --hourly"),
        (["--accept-rate", "0.5"], "--accept-rate is 0.5 without --draft-tokens"),
        (["--accept-rate", "2", "--draft-tokens", "4"], "--accept-rate is 2; it must be"),
        (["--hourly", "-3", "--tokens-per-s", "1"], "--hourly is -3; it must be"),
        (["--hourly", "3"], "--hourly is 3 without --tokens-per-s or --requests-per-s"),
        (["--overhead", "-0.1", "--hourly", "3"], "--overhead is -0.1; it must be"),
        (["--api-price", "2", "--own-price", "1"], "--own-price is 1 without --fixed-monthly"),
        (
            ["--fixed-monthly", "9", "--api-price", "2", "--own-price", "2"],
            "--own-price is 2 and --api-price is 2",
        ),
    ],
)
def test_refusals(here, model, args, words):
    done = here("plan", model, *args)
    assert (done.code, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert words in done.stderr


def test_a_wrong_number_is_refused_before_the_model_is_looked_for(here):
    assert "--users is 0" in here("plan", "no-such-model", "--users", "0").stderr
    assert "kv_bits is '5'" in here("plan", "no-such-model", "--kv-bits", "5").stderr


def test_models_that_are_not_here(here, tmp_path):
    assert "`mlxserve pull smollm2-135m` fetches it" in here("plan", "smollm2-135m").stderr
    assert "is no model that can be found here" in here("plan", "smollm3").stderr
    (tmp_path / "empty").mkdir()
    assert "the directory is empty" in here("plan", str(tmp_path / "empty")).stderr


def test_a_config_that_does_not_tell_the_size_of_the_weights(here, tmp_path):
    config = LLAMA_8B | {"quantization": {"bits": 4, "group_size": 64}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    done = here("plan", str(tmp_path))
    assert done.code == 2
    assert "only the weights tell their size" in done.stderr


def test_weights_that_are_here_count_as_their_files(told, tiny_model_dir):
    plan = told(str(tiny_model_dir))
    assert plan["model_context_tokens"] == plan["context_tokens"] == 2048
    assert plan["memory"]["weight_bytes"] >= 2 * plan["parameters"]


def test_latents_and_states(capsys):
    model = PlannedModel(
        name="m",
        kind="made-up",
        specs=(Latent(512, 64), Latent(512, 64), State(((4, 16), (3,)))),
        context_tokens=4096,
        parameters=1000,
        weight_bytes=2000,
        counted=False,
        float32=False,
        width=8,
        parts=Parts(100, (300, 300, 200), 100, 400),
        step=StepShape(ahead=50, heads=(1, 1, 0), outside=8, vocab_size=10, itemsize=4),
    )
    with pytest.raises(RequestError, match="--kv-bits is 8, and m keeps nothing that can be"):
        plan_figures.setting(model, {}, (8, 8))
    at = plan_figures.setting(model, {"memory": 1}, (16, 16))
    show(at, {"memory": 1}, explain=True, as_json=False)
    text = " ".join(capsys.readouterr().out.split())
    assert "2 layers, latents of 512 + 64 9.0 MiB at 4,096 tokens, 2.2 KiB per token" in text
    assert "= 2 * 64 * (64 * 1 * 576 * 2)" in text
    assert "1 layer, a state 268 bytes at any length" in text
    assert "= 1 * (4 * 16 + 3) * 4" in text


@pytest.mark.real
def test_a_gguf_file(told, smollm2_gguf):
    plan = told(str(smollm2_gguf), "--kv-bits", "16", "--memory", "1")
    assert plan["parameters"] == 134_515_008
    assert plan["cache"]["token_bytes"] == 30 * 2 * 3 * 64 * 2
    assert plan["memory"]["fits"]
