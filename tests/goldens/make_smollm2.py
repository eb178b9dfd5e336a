"""Makes the SmolLM2-135M-Instruct goldens: smollm2_tokens.json and smollm2_logprobs.json.

    python tests/goldens/make_smollm2.py SmolLM2-135M-Instruct.Q4_1.gguf

See with_llama_cpp.py for what is in them and what it needs.
"""

import argparse
from pathlib import Path

from strings import MIXED, STRINGS
from with_llama_cpp import score, tokenise, write

PROSE = (
    "The harbour was quiet that morning, and the fishing boats lay tied to the wall like sleeping "
    "dogs. Marta walked along the pier with a basket of bread, counting the steps as her "
    "grandmother had taught her. When she reached the lighthouse she stopped, because the door, "
    "which nobody had opened in eleven years, was standing wide open, and someone was singing."
)
CODE = '''def moving_average(values, width):
    """Average of each window of `width` neighbouring values."""
    if width < 1 or width > len(values):
        raise ValueError(f"width {width} does not fit {len(values)} values")
    total = sum(values[:width])
    averages = [total / width]
    for i in range(width, len(values)):
        total += values[i] - values[i - width]
        averages.append(total / width)
    return averages
'''
CHAT = (
    "<|im_start|>system\nYou answer in one short sentence.<|im_end|>\n"
    "<|im_start|>user\nWhat is the largest planet in our solar system?<|im_end|>\n"
    "<|im_start|>assistant\nThe largest planet in our solar system is Jupiter.<|im_end|>\n"
    "<|im_start|>user\nAnd which one is closest to the Sun?<|im_end|>\n"
    "<|im_start|>assistant\nMercury is the planet closest to the Sun.<|im_end|>\n"
)
NUMBERS = (
    "Shopping list for 12 people:\n1. 3.5 kg potatoes\n2. 24 eggs\n3. 750 g butter\n"
    "4. 2 x 1000 ml milk\n\nPowers of two: 1, 2, 4, 8, 16, 32, 64, 128, 256\n"
    "Total: $48.90 (paid on 2024-03-17 at 18:45)\n"
)
FRENCH = (
    "Le petit marché s'ouvre à sept heures. Les marchands installent leurs tables, "
    "déballent les légumes et crient déjà les prix. Une vieille dame achète trois pommes, "
    "puis elle s'assoit près de la fontaine pour écouter les cloches de l'église."
)
SCORED = {
    "prose": PROSE,
    "code": CODE,
    "chat": CHAT,
    "numbers": NUMBERS,
    "french": FRENCH,
}
SPECIAL = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "before<|im_end|>after",
    "before <|im_end|> after",
    "  <|im_start|>  ",
    "\n<|im_end|>\n\n",
    "<|im_start|><|im_start|><|im_end|><|im_end|>",
    "<|im_start",
    "|im_start|>",
    "<|im_start|",
    "<<|im_end|>>",
    "< |im_end|>",
    "<|IM_END|>",
    "<|im_end|><|endoftext|>",
    "<repo_name>a/b<file_sep>src/x.py\nprint(1)\n",
    "<reponame><filename>main.c",
    "<gh_stars>100",
    "<issue_start><issue_comment>text<issue_closed>",
    "<jupyter_start><jupyter_text>x<jupyter_code>y<jupyter_output>z<jupyter_script>",
    "<empty_output>",
    "1<|im_end|>2",
    "don<|im_end|>'t",
    "<|unknown|> <s> </s> <pad> <unk>",
    "Ġ Ċ Ã© ĠĠ",
    "😀<|im_end|>😀",
    "<|endoftext|>\u00e9<|endoftext|>",
    "<repo_name",
    "repo_name>",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("gguf", type=Path, help="SmolLM2-135M-Instruct.Q4_1.gguf")
    path = parser.parse_args().gguf
    write("smollm2_tokens.json", tokenise(path, [*STRINGS, *SPECIAL, *MIXED, *SCORED.values()]))
    write("smollm2_logprobs.json", score(path, SCORED))


if __name__ == "__main__":
    main()
