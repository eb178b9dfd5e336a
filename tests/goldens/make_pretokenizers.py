"""Makes the goldens for GGUF's kinds of pre-tokenizers with llama.cpp.

    python tests/goldens/make_pretokenizers.py

Needs `pip install llama-cpp-python==0.3.36 gguf`, which builds llama.cpp (set CMAKE_ARGS to
-DGGML_NATIVE=OFF where the result dies of an illegal instruction). Nothing of mlxserve runs here.
For each kind it writes a GGUF file that holds only a vocabulary, the same one for all, and lets
llama.cpp tokenise the same texts. It writes pretokenizers.json beside itself:

    merges: the vocabulary's merges, as a GGUF file has them. The tokens are the 256 of the byte
        alphabet in order of bytes, what the merges make in order, and then `special`.
    special: pairs of a token and its GGUF type, at the end of the vocabulary.
    texts: the texts.
    kinds: name -> which of `ids` is that kind's, since many kinds do the same.
    ids: per text, its ids (no BOS, special tokens recognised).

The merges are trained on the texts themselves, cut nowhere, until each text is one token: so a cut
that falls elsewhere shows in the ids. One word is in the vocabulary and comes out of no merges.
"""

# ruff: noqa: RUF001 (the texts are meant to look alike)

import itertools
import json
import tempfile
import unicodedata
from collections import Counter
from pathlib import Path

import gguf
import llama_cpp

HERE = Path(__file__).parent
# The last is a word that no merges make, for the kinds that look words up whole.
SPECIAL = [
    ("<s>", 3),
    ("</s>", 3),
    ("<|turn|>", 3),
    ("<tool>", 4),
    ("<sentinel:7>", 4),
    ("Ġunmerged", 1),
]

# fmt: off
KINDS = [
    "a.x-4.0", "afmoe", "bailingmoe", "bailingmoe2", "bloom", "chameleon", "chatglm-bpe",
    "codeshell", "cohere2moe", "command-r", "dbrx", "deepseek-coder", "deepseek-llm",
    "deepseek-r1-qwen", "deepseek-v3", "exaone", "exaone-moe", "exaone4", "f2llmv2", "falcon",
    "falcon-h1", "falcon3", "gigachat", "glm4", "glm5", "gpt-2", "gpt-4o", "gpt3-finnish",
    "granite-docling", "granite-embed-multi-97m", "grok-2", "hunyuan", "hunyuan-dense", "hy_v4",
    "jais", "jais-2", "jina-de", "jina-es", "jina-v2-de", "jina-v2-es", "jina-v5-nano",
    "joyai-llm", "kanana2", "kimi-k2", "kormo", "laguna", "lfm2", "llada-moe", "llama-bpe",
    "llama-v3", "llama3", "llama4", "megrez", "mellum", "mellum2", "midm-2.0", "minerva-7b",
    "minicpm5", "minimax-m2", "modern-bert", "mpt", "olmo", "phi-2", "pixtral", "poro-chat",
    "qwen2", "qwen35", "refact", "seed-coder", "smaug-bpe", "smollm", "solar-open", "spark2_5",
    "stablelm2", "starcoder", "superbpe", "talkie", "tekken", "tiny_aya", "trillion",
    "ufakzeka", "viking", "youtu",
]
# fmt: on

TEXTS = [
    "The baker counts twelve loaves.",
    "don't can't I'm you're he's she'll we've they'd",
    "DON'T CAN'T I'M YOU'RE HE'S SHE'LL WE'VE THEY'D",
    "don’t 'tis rock'n'roll ''s' '",
    "camelCase PascalCase HTTPServer iPhone snake_case SCREAMING_CASE mcDonald's",
    "İstanbul'da Ankara'nın",
    "1 22 333 4444 55555 666666 7777777",
    "12345678 1234567890123",
    "3.14 -2 1,000,000.00 2E+10 0x1F v1.2.3",
    "abc123def 4x4 a1b22c333d4444",
    "x² ½ Ⅳ ①② ٠١٢٣٤ १२३४ １２３４５",
    " a  b   c    d     e",
    "a ",
    "a  ",
    "    indented",
    "\n",
    "\n\n\n",
    "a\nb\n\nc\n\n\nd",
    "a \n b  \n  c\r\nd\r\n\r\ne",
    "\ta\t\tb\t \tc \t",
    "end.\n\nNext (line):\n- item\n",
    " " * 33 + "x" + " " * 17,
    "a\u00a0b\u3000c\u2003d\u2028e\u200bf\u0085g",
    "!!! ??? ... --- *** ### ((([[[{{{",
    "a,b;c:d!e?f.g",
    "“quoted” ‘single’ «guillemets» – dash — em… ¿Qué? ¡No!",
    "$5 €6 £7 ¥8 50% a+b=c <tag> x^2 ~y |z| `code`",
    "https://example.org/a/b?c=d&e=f#g me@example.org /usr/lib C:\\Temp",
    "def area(w, h):\n    return w*h  # m²\n\n\nif __name__ == '__main__':\n\tprint(area(2,3))",
    "for (int i=0;i<10;++i) { a[i]+=b->c; } // done",
    '{"key": [1, 2.5, null], "é": "ü"}',
    "/* block */\n#include <stdio.h>\n",
    "東京の朝はとても静かです。カタカナ、ひらがな！",
    "我有3个苹果，你呢？共10元。",
    "我喜欢Python和C++。 Hello世界",
    "한국어 문장입니다. 안녕하세요! ㄱㄴㄷ",
    "ภาษาไทย ລາວ မြန်မာ ខ្មែរ",
    "اللغة العربية، جميلة؟ مُحَمَّد",
    "עברית שָׁלוֹם",
    "हिन्दी में लिखा है। বাংলা தமிழ்",
    "Привет, МИР! ПриветМир Ёлка",
    "Καλημέρα ΚΌΣΜΕ ΚαλημέραΚόσμε",
    "Straße GROẞE ÉCOLE École éCOLE ÅNGström ǅ",
    "café naïve",
    unicodedata.normalize("NFD", "café naïve"),
    unicodedata.normalize("NFD", "한국어"),
    "e\u0301\u0302\u0303 q\u0307\u0323 \u0301x",
    "😀👍🏽 👩‍💻 🇫🇷 a😀b ☃️ ♥",
    "…—–·•※→∀∑√",
    "a\u0000b\u0001c\u007fd",
    "\U0001d54f\U00020000\U000e0001\ue000\u0378",
    "ａｂｃ ＡＢＣ ！？",
    "'S 'LL 'ſ x'ſ K'd",
    "<s>user</s> <|turn|>hi <tool>x<tool>  <sentinel:7>IMGIMGABCZ",
    "a/b /c //d\n/e a\n/\n/",
    "word\n 5\n\n 7\n\t8",
    "A B C AB ABC aB Ab aBC ABc",
    "word  \n\n  word",
    "#hashtag @name _under_ __dunder__ -dash--",
    "an unmerged word",
    "J'ai d'abord l'été aujourd'hui",
]
TEXTS += [n for t in TEXTS if (n := unicodedata.normalize("NFC", t)) not in TEXTS]


def byte_alphabet() -> list[str]:
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def train(texts: list[str], alphabet: list[str]) -> list[tuple[str, str]]:
    words = [[alphabet[byte] for byte in text.encode()] for text in texts]
    merges = []
    while True:
        pairs = Counter(pair for word in words for pair in itertools.pairwise(word))
        if not pairs:
            return merges
        left, right = best = max(pairs, key=lambda pair: (pairs[pair], pair))
        merges.append(best)
        for word in words:
            i = 0
            while i < len(word) - 1:
                if word[i] == left and word[i + 1] == right:
                    word[i : i + 2] = [left + right]
                i += 1


def write_vocabulary(
    path: Path, kind: str, tokens: list[str], merges: list[tuple[str, str]]
) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(kind)
    names = [name for name, _ in SPECIAL]
    writer.add_token_list([*tokens, *names])
    writer.add_token_types([1] * len(tokens) + [number for _, number in SPECIAL])
    writer.add_token_merges([f"{left} {right}" for left, right in merges])
    writer.add_bos_token_id(len(tokens))
    writer.add_eos_token_id(len(tokens) + 1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


def main() -> None:
    alphabet = byte_alphabet()
    merges = train([text for text in TEXTS if "unmerged" not in text], alphabet)
    tokens = list(dict.fromkeys([*alphabet, *[left + right for left, right in merges]]))
    kinds: dict[str, int] = {}
    distinct: list[list[list[int]]] = []
    for kind in KINDS:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "vocabulary.gguf"
            write_vocabulary(path, kind, tokens, merges)
            model = llama_cpp.Llama(str(path), n_ctx=8, vocab_only=True, verbose=False)
            ids = [model.tokenize(t.encode(), add_bos=False, special=True) for t in TEXTS]
        if ids not in distinct:
            distinct.append(ids)
        kinds[kind] = distinct.index(ids)
    golden = {
        "merges": [f"{left} {right}" for left, right in merges],
        "special": SPECIAL,
        "texts": TEXTS,
        "kinds": kinds,
        "ids": distinct,
    }
    text = json.dumps(golden, ensure_ascii=True, separators=(",", ":"))
    # A line for each of the big lists, so that a change shows as such.
    for key in ("special", "texts", "kinds", "ids"):
        text = text.replace(f',"{key}":', f',\n"{key}":')
    (HERE / "pretokenizers.json").write_text(text + "\n", encoding="utf-8")
    print(f"{len(TEXTS)} texts, {len(merges)} merges, {len(kinds)} kinds, {len(distinct)} differ")


if __name__ == "__main__":
    main()
