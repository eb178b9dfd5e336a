"""Makes the SmolLM2-135M-Instruct goldens with llama.cpp: token ids and log-probabilities.

    python tests/goldens/make_smollm2.py SmolLM2-135M-Instruct.Q4_1.gguf

Needs `pip install llama-cpp-python==0.3.36`, which builds llama.cpp (set CMAKE_ARGS to
-DGGML_NATIVE=OFF where the result dies of an illegal instruction). Nothing of mlxserve runs here.
It writes two files beside itself:

smollm2_tokens.json: `cases`, pairs of a text and its ids (no BOS, special tokens recognised).

smollm2_logprobs.json: `texts`, each with its ids and, for every position but the first, the
natural logarithm of the probability of the id there given those before it, from a log-softmax in
float64:
    `logprobs`: the file as llama.cpp runs it, quantising activations to 8 bits for each matmul;
    `logprobs_f32`: the same weights turned back to float32 by llama.cpp, in float32 throughout.
The first shows how far quantised arithmetic strays; exact arithmetic should meet the second.
Keys and values are kept in float32 for both.
"""

# ruff: noqa: RUF001 (the texts are meant to look alike)

import argparse
import json
import tempfile
from pathlib import Path

import llama_cpp
import numpy as np

HERE = Path(__file__).parent
F32 = 0  # both ggml's type and llama.cpp's file type

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

ENGLISH = [
    "Hello",
    " Hello",
    "Hello, world!",
    "hello world",
    "HELLO WORLD",
    "The quick brown fox jumps over the lazy dog.",
    "A sentence. And another one! Is this a third? Yes...",
    "an antidisestablishmentarian's floccinaucinihilipilification",
    "e.g. i.e. etc. vs. Dr. Mr. Mrs.",
    "well-known, state-of-the-art, mother-in-law",
    "“curly quotes” and ‘single ones’ – with dashes — of two lengths…",
    "some_snake_case and someCamelCase and SomePascalCase and SCREAMING_CASE",
    "mail me at someone@example.org or see https://example.org/a/b?c=d&e=f#g",
    "/usr/local/share/fonts and C:\\Users\\Someone\\Desktop",
    "50% off! #sale @shop *bold* _italic_ ~strike~ `code`",
]
CONTRACTIONS = [
    "don't can't won't shouldn't I'm you're he's she'll we've they'd",
    "DON'T CAN'T I'M YOU'RE HE'S SHE'LL WE'VE THEY'D",
    "Don’t can’t I’m you’re he’s she’ll we’ve they’d",
    "'s 't 're 've 'm 'll 'd",
    "it's'nt 'tis 'twas rock'n'roll",
    "'S 'T 'RE",
    "o'clock d'accord l'été 'quoted' ''doubly''",
    "the '90s and the 1990's",
    "x'y'z'sure'dare'll",
    "'",
    "''",
    "' s ' t",
]
DIGITS = [
    "0",
    "7",
    "42",
    "123",
    "1234567890",
    " 1 22 333 4444",
    "3.14159",
    "-273.15",
    "1,000,000.00",
    "1e-9 2E+10 0x1F 0b1010 0o17",
    "2024-03-17T18:45:00Z",
    "v1.2.3-rc4",
    "a1b2c3",
    "1st 2nd 3rd 4th",
    "½ ¼ ¾ ⅓",
    "x² y³ z¹⁰",
    "H₂O CO₂",
    "Ⅰ Ⅱ Ⅲ Ⅳ Ⅻ",
    "①②③ ⑩ ⑳",
    "٠١٢٣٤٥٦٧٨٩",
    "०१२३४५६७८९",
    "１２３４５",
    "一二三四五十百千万",
    "𝟎𝟏𝟐 𝟘𝟙𝟚",
    "1 2  3   4",
    "1\n2\n3",
    "5+7=12; 12*3=36; 36/4=9",
    "$1,234.56 €99,99 £5 ¥1000",
    "100%",
    "12:34:56.789",
    "২০২৪ সাল",
    "〇 〡〢〣",
]
SPACES = [
    "",
    " ",
    "  ",
    "   ",
    "    ",
    " " * 7,
    " " * 16,
    " " * 33,
    "\n",
    "\n\n",
    "\n\n\n",
    "\n" * 9,
    "\t",
    "\t\t",
    "\t\t\t\tx",
    " \n",
    "\n ",
    " \n \n ",
    "\r",
    "\r\n",
    "\r\n\r\n",
    "a\r\nb\r\nc",
    "a b",
    "a  b",
    "a   b",
    "a    b",
    "a\tb",
    "a\t\tb",
    "a \tb",
    "a\t b",
    "a\nb",
    "a\n\nb",
    "a\n\n\nb",
    "a \nb",
    "a\n b",
    "  leading",
    "trailing  ",
    "  both  ",
    "\n\n  indented\n    more\n",
    "a\u00a0b",
    "a\u00a0\u00a0b",
    "\u00a0",
    "a\u2003b\u2009c\u200ad",
    "a\u3000b",
    "a\u200bb",
    "a\u2028b\u2029c",
    "a\u0085b",
    "a\u000bb\u000cc",
    "\u1680x\u205fy\u202fz",
    "\ufeffwith a mark",
    "word \u00a0 word",
    "x\u180ey",
    "end with newline\n",
    "end with space ",
    "1  2\t\t3\n\n4",
    "     five\n   three\n one",
    ".   .\n\n.",
    "\u001c \u001d \u001e \u001f",
]
CODE_CASES = [
    "def f(x):\n    return x + 1\n",
    "class A(B):\n\tdef __init__(self, *args, **kwargs):\n\t\tsuper().__init__()\n",
    "for (int i = 0; i < n; ++i) { sum += a[i]; }",
    '#include <stdio.h>\nint main(void) { printf("hi\\n"); return 0; }\n',
    "fn main() -> Result<(), Box<dyn Error>> { let v: Vec<u8> = vec![0; 16]; Ok(()) }",
    "const f = async (x) => { await g(`${x}`); };",
    "SELECT name, COUNT(*) FROM users WHERE age >= 18 GROUP BY name HAVING COUNT(*) > 1;",
    '{"key": [1, 2.5, null, true], "nested": {"a": "b\\n"}}',
    '<div class="row"><p>Text &amp; more</p></div>',
    "a.b->c::d[e](f){g}<h>",
    "if x==y!=z<=w>=v&&u||!t:",
    "x = y if z else w  # comment",
    "/* block */ // line\n",
    "git commit -m 'fix: off-by-one' && git push --force-with-lease",
    "^[a-z0-9._%+-]+@[a-z0-9.-]+\\.[a-z]{2,}$",
    "\\frac{1}{2} \\sum_{i=0}^{n} x_i^2",
    "| a | b |\n|---|---|\n| 1 | 2 |\n",
    "```python\nprint('x')\n```\n",
    "# Title\n\n## Section\n\n- item\n  - sub item\n",
    "\tif (a) {\n\t\tb();\n\t}\n",
    "        eight = 8\n            twelve = 12\n",
    "key: value\nlist:\n  - one\n  - two\n",
    "0xDEADBEEF & ~(1 << 31)",
    "lambda x: (x**2, x//3, x%5, x@y)",
    "!!! ??? ... ,,, ;;; ::: --- === +++ *** /// \\\\\\",
    "()[]{}<>",
    "(((((((((())))))))))",
    "================================",
    "--------------------------------------------------------",
    "_________",
    '#!/usr/bin/env bash\nset -euo pipefail\necho "$HOME"\n',
    "import numpy as np\n\n\nx = np.zeros((3, 4), dtype=np.float32)\n",
    "@decorator\nasync def g(): yield",
    'printf("%5.2f%%\\n", 3.14159);',
    "aGVsbG8gd29ybGQ=",
    "d41d8cd98f00b204e9800998ecf8427e",
]
LANGUAGES = [
    "Übergrößenträger fließen gemütlich",
    "Le cœur déçu mais l'âme plutôt naïve",
    "El pingüino Wenceslao hizo kilómetros bajo exhaustiva lluvia",
    "À noite, vovô vê o ímã cair no pé do pinguim",
    "Příliš žluťoučký kůň úpěl ďábelské ódy",
    "Zażółć gęślą jaźń",
    "Pijamalı hasta yağız şoföre çabucak güvendi İIıi",
    "Съешь же ещё этих мягких булок, да выпей чаю",
    "Ξεσκεπάζω την ψυχοφθόρα βδελυγμία",
    "我喜欢在清晨喝一杯热茶。",
    "機械学習のモデルは、とても大きいです。",
    "カタカナとひらがなと漢字",
    "안녕하세요, 세계! 오늘은 날씨가 좋네요.",
    "こんにちは　世界",
    "你好,world!混合English和中文123",
    "，。！？；：「」『』（）【】《》",
    "ﾊﾝｶｸ ｶﾀｶﾅ",
    "مرحبا بالعالم، كيف حالك اليوم؟",
    "اَلْعَرَبِيَّةُ",
    "שלום עולם, מה שלומך?",
    "שָׁלוֹם",
    "नमस्ते दुनिया, आप कैसे हैं?",
    "বাংলা ভাষায় লেখা একটি বাক্য",
    "வணக்கம் உலகம்",
    "สวัสดีชาวโลก วันนี้อากาศดี",
    "ສະບາຍດີ",
    "မင်္ဂလာပါ",
    "ជំរាបសួរ",
    "გამარჯობა მსოფლიო",
    "Բարեւ աշխարհ",
    "ሰላም ልዑል",
    "ᐃᓄᒃᑎᑐᑦ",
    "ᚠᛇᚻ᛫ᛒᛦᚦ",
    "𐌰𐌱𐌲 𐎀𐎁 𓀀𓁐",
    "Việt Nam: phở, bánh mì, cà phê sữa đá",
    "Ég get etið gler án þess að meiða mig",
    "Kŝĉĥĵŝŭ eĥoŝanĝo",
    "ཀཁག བོད་ཡིག",
    "ᠮᠣᠩᠭᠣᠯ",
    "ꦲꦏ꧀ꦱꦫ",
]
EMOJI = [
    "😀",
    "😀😀😀",
    "hi 😀 there",
    "👍🏽",
    "👍👍🏻👍🏼👍🏽👍🏾👍🏿",
    "👩‍💻",
    "👨‍👩‍👧‍👦",
    "👩🏾‍🚀 in space",
    "🏳️‍🌈",
    "🇩🇪🇫🇷🇯🇵",
    "❤️ ❤ ♥️",
    "1️⃣2️⃣3️⃣ #️⃣",
    "☀️☁️☂️",
    "🙈🙉🙊",
    "✅ done ❌ failed ⚠️ careful",
    "→ ← ↑ ↓ ⇒ ⇔",
    "★☆♠♣♥♦♪♫",
    "┌─┬─┐│ │ │└─┴─┘",
    "█▓▒░",
    "🦄🫠🫨🪿",
    "a😀b👍🏽c",
    "😀1😀2",
    "\u200d",
    "\ufe0f",
    "🏴\U000e0067\U000e0062\U000e0073\U000e0063\U000e0074\U000e007f",
    "(╯°□°）╯︵ ┻━┻",
    "¯\\_(ツ)_/¯",
]
MARKS = [
    "e\u0301 a\u0300 n\u0303 o\u0308",
    "caf\u00e9 cafe\u0301",
    "Z\u0351\u036b\u0343a\u0321l\u0334g\u0337o\u0338",
    "\u0301",
    " \u0301",
    "a\u0301\u0302\u0303\u0304",
    "q\u0307\u0323 q\u0323\u0307",
    "x\u20d7 = y\u20d7",
    "\u0e01\u0e33\u0e49",
    "\u1100\u1161\u11a8 각",
    "ﬁ ﬂ ﬃ ﬆ",
    "ǆ ǅ Ǆ",
    "ß ẞ ſ",
    "K Å Ω",
    "ℵ ℏ ℝ ∑ ∫ √ ∞ ≠ ≤ ≥ ± × ÷",
    "𝒜𝓁𝓅𝒽𝒶 𝔹𝕖𝕥𝕒 𝐆𝐚𝐦𝐦𝐚",
    "ª º ¹ ² ³",
    "© ® ™ § ¶ † ‡ • ‰",
    "\u202eright to left\u202c",
    "\u00ad soft\u00adhyphen",
    "\u0378 \u0e5f \uffff",
    "\ue000 \uf8ff private",
    "\U000f0000 \U0010ffff",
    "\U00040000 \U000e0001",
    "\U0001f9ff\U0001fa70 \U0002f800",
    "\ufffd replacement",
    "\u0000",
    "a\u0000b",
    "\u0001\u0002\u0003\u0005",
    "\u0004 and \u0006 have no token",
    "\u007f\u0080\u009f",
    "\u001b[31mred\u001b[0m",
]
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
MIXED = [
    "Price: 3€ (≈ $3.25) – “cheap”, n'est-ce pas? 😀\n\n\tOK!",
    "日本語とEnglishが混ざった文章です。123個、４５６円。",
    "Привет, world! 你好 123 مرحبا 👋🏽",
    "a\u0301b c\u0327d\n  e\u0301f 12½",
    "x=1;y=２;z=三",
    "the 3 cats' 9 lives, 27 in all",
    "pip install 'mlx>=0.32' && python -m pytest -q  # 100% green",
    "Line one\n\nLine two\n\n\n\nLine three\t\t\tend",
    "supercalifragilisticexpialidocious" * 3,
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "abababababababababababababababab",
    "的" * 20,
    "é" * 15,
    "😀 " * 8,
    "1 " * 12,
    "\n \n  \n   \n",
    "\u00a01\u00a02",
    "\u00e9\u00e8\u00ea\u00eb\u0113",
    "...Mr. O'Neill's 2nd-hand car—he'd bought it for £1,999.99—didn't start!",
    "T\u00fcr\u200bzu 10\u202f000\u00a0km",
]
TOKENISED = [
    *ENGLISH,
    *CONTRACTIONS,
    *DIGITS,
    *SPACES,
    *CODE_CASES,
    *LANGUAGES,
    *EMOJI,
    *MARKS,
    *SPECIAL,
    *MIXED,
    *SCORED.values(),
]


def tokenise(path: Path) -> dict[str, object]:
    model = llama_cpp.Llama(model_path=str(path), vocab_only=True, verbose=False)
    cases = [[text, _ids(model, text)] for text in dict.fromkeys(TOKENISED)]
    return {"engine": _engine(), "model": path.name, "cases": cases}


def score(path: Path) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as scratch:
        exact = Path(scratch) / "f32.gguf"
        params = llama_cpp.llama_model_quantize_default_params()
        params.ftype = F32
        params.allow_requantize = True
        if llama_cpp.llama_model_quantize(str(path).encode(), str(exact).encode(), params):
            raise SystemExit("llama.cpp could not write the weights as float32")
        as_run, as_f32 = _logprobs(path), _logprobs(exact)
    texts = [
        {"name": name, "text": text, "ids": as_run[name][0], "logprobs": as_run[name][1]}
        | {"logprobs_f32": as_f32[name][1]}
        for name, text in SCORED.items()
    ]
    return {"engine": _engine(), "model": path.name, "texts": texts}


def _logprobs(path: Path) -> dict[str, tuple[list[int], list[float]]]:
    model = llama_cpp.Llama(
        model_path=str(path),
        n_ctx=512,
        n_batch=512,
        n_threads=1,
        n_threads_batch=1,
        logits_all=True,
        type_k=F32,
        type_v=F32,
        flash_attn=False,
        verbose=False,
    )
    results = {}
    for name, text in SCORED.items():
        ids = _ids(model, text)
        model.reset()
        model.eval(ids)
        logits = np.asarray(model.scores[: len(ids)], dtype=np.float64)
        peak = logits.max(axis=-1, keepdims=True)
        logprobs = logits - peak - np.log(np.exp(logits - peak).sum(axis=-1, keepdims=True))
        chosen = logprobs[np.arange(len(ids) - 1), ids[1:]]
        results[name] = ids, [round(float(value), 7) for value in chosen]
    return results


def _ids(model: llama_cpp.Llama, text: str) -> list[int]:
    # llama-cpp-python takes an empty text for a mistake.
    return model.tokenize(text.encode(), add_bos=False, special=True) if text else []


def _engine() -> str:
    return f"llama-cpp-python {llama_cpp.__version__}"


def _write(name: str, value: dict[str, object]) -> None:
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"))
    # One case or text a line, so that a change shows as one.
    for before in ('["', '{"name"'):
        text = text.replace(f",{before}", f",\n{before}").replace(f"[{before}", f"[\n{before}")
    (HERE / name).write_text(text + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("gguf", type=Path, help="SmolLM2-135M-Instruct.Q4_1.gguf")
    path = parser.parse_args().gguf
    _write("smollm2_tokens.json", tokenise(path))
    _write("smollm2_logprobs.json", score(path))


if __name__ == "__main__":
    main()
