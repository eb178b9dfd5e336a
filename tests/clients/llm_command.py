"""The `llm` command against a server: prints what it was told, as JSON.

python llm_command.py URL KEY LIMITED_URL

The last is for others: `llm` waits and tries again where it is told to.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from asking import BIG, CHAT, MODEL, SCHEMA

URL, KEY, _ = sys.argv[1:]
PROMPT = CHAT[0]["content"]
LLM = Path(sys.executable).with_name("llm")
FUNCTION = 'def clock(city: str) -> str:\n    "The time somewhere"\n    return "Noon"\n'
ENTRY = """\
- model_id: {name}
  model_name: {model}
  api_base: {url}/v1
  api_key_name: {key}
  supports_schema: true
  supports_tools: true
"""


def settings(folder):
    """What a user writes once: where the models are, and the keys."""
    models = [
        ("here", MODEL, "good"),
        ("unknown", "other", "good"),
        ("locked", MODEL, "bad"),
    ]
    entries = [ENTRY.format(name=n, model=m, url=URL, key=k) for n, m, k in models]
    (folder / "extra-openai-models.yaml").write_text("".join(entries))
    (folder / "keys.json").write_text(json.dumps({"good": KEY, "bad": "not the key"}))


def llm(model, *args, prompt=PROMPT):
    """What it prints, and what it complains of."""
    command = [LLM, "-m", model, "--no-log", *args]
    ran = subprocess.run(command, input=prompt.encode(), capture_output=True)
    return ran.stdout.decode(), ran.stderr.decode()


with tempfile.TemporaryDirectory() as folder:
    os.environ["LLM_USER_PATH"] = folder
    settings(Path(folder))
    greedy = ("-o", "temperature", "0", "-o", "max_tokens", "24")
    short = ("-o", "max_tokens", "1")
    sampled = ("-o", "temperature", "1", "-o", "seed", "1", "-o", "max_tokens", "300")
    print(
        json.dumps(
            {
                "whole": llm("here", "--no-stream", *greedy),
                "streamed": llm("here", *greedy),
                "form": llm("here", "--schema", json.dumps(SCHEMA), *sampled),
                "with tools": llm("here", "--functions", FUNCTION, *greedy),
                "errors": {
                    "bad value": llm("here", "-o", "max_tokens", "0"),
                    "wrong key": llm("locked", *short),
                    "no such model": llm("unknown", *short),
                    "too big": llm("here", *short, prompt=BIG),
                },
            }
        )
    )
