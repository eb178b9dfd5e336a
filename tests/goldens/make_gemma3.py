"""Makes the gemma3-270m goldens: gemma3_tokens.json and gemma3_logprobs.json.

    python tests/goldens/make_gemma3.py gemma-3-270m-q4_k_m.gguf

See with_llama_cpp.py for what is in them and what it needs. The scored texts are short, since tests
run them through a vocabulary of 262144 on CPUs, and begin with BOS, as the model was trained.
"""

import argparse
from pathlib import Path

from strings import MIXED, STRINGS
from with_llama_cpp import score, tokenise, write

PROSE = (
    "The harbour was quiet that morning, and the fishing boats lay tied to the wall like sleeping "
    "dogs. Marta walked along the pier with a basket of bread, counting the steps."
)
CODE = '''def mean(values):
    """Average of a list of numbers."""
    if not values:
        raise ValueError("no values")
    return sum(values) / len(values)
'''
NUMBERS = "1. 3.5 kg potatoes\n2. 24 eggs\n\nPowers of two: 1, 2, 4, 8, 16, 32\n"
FRENCH = (
    "Le petit marché s'ouvre à sept heures. Les marchands installent leurs tables, "
    "déballent les légumes et crient déjà les prix."
)
JAPANESE = "東京は日本の首都です。春には桜が咲き、多くの人が公園で花見を楽しみます。"
SCORED = {
    "prose": PROSE,
    "code": CODE,
    "numbers": NUMBERS,
    "french": FRENCH,
    "japanese": JAPANESE,
}

SPECIAL = [
    "<bos>",
    "<eos>",
    "<start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n",
    "before<end_of_turn>after",
    "before <end_of_turn> after",
    "  <start_of_turn>  ",
    "\n<end_of_turn>\n\n",
    "<start_of_turn><start_of_turn><end_of_turn><end_of_turn>",
    "<start_of_turn",
    "<<end_of_turn>>",
    "< end_of_turn>",
    "<END_OF_TURN>",
    "1<end_of_turn>2",
    "<bos>\u00e9<eos>",
    "<pad><unk><mask>",
    "<unused0> <unused99>",
    "<start_of_image><end_of_image>",
    "<table><tr><td>1</td></tr></table>",
    "<h1>Title</h1><blockquote>q</blockquote>",
    "<0x41><0x0A>",
    "\u2581",
    "a\u2581b",
    " \u2581 ",
    "<s> </s> [toxicity] [multimodal]",
    "\U0001f600<end_of_turn>\U0001f600",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("gguf", type=Path, help="gemma-3-270m-q4_k_m.gguf")
    path = parser.parse_args().gguf
    write("gemma3_tokens.json", tokenise(path, [*STRINGS, *SPECIAL, *MIXED, *SCORED.values()]))
    write("gemma3_logprobs.json", score(path, SCORED, add_bos=True))


if __name__ == "__main__":
    main()
