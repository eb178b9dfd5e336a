r"""How byte-level BPE cuts a text into words first: the kinds that a GGUF file can name.

Each kind stands for one family's tokenizer.json, and does what that file does. llama.cpp is where
the names come from; where its hand-written splitting strays from the original (upper and lower case
beyond ASCII, combining marks, NFC), the original is followed here, and the tests name the places.

The patterns are Oniguruma's, as in tokenizer.json: `\p{L}` letters, `\p{N}` numbers, `(?!\S)` at
the end of a run of spaces, which leaves the last space to the word after it.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend


@dataclass(frozen=True, slots=True, kw_only=True)
class PreTokenizer:
    """One way of cutting a text into words.

    splits: patterns, one after the other on the pieces of the one before; what a pattern matches is
        a piece, and so is what lies between two matches.
    nfc: the text is normalised first.
    ignore_merges: a word that is a token is that token, whatever its merges say.
    adds_bos: a prompt begins with BOS unless the file says otherwise.
    """

    splits: tuple[str, ...]
    nfc: bool = False
    ignore_merges: bool = False
    adds_bos: bool = False

    def apply_to(self, backend: "Backend") -> None:
        """Set the backend's normalizer and pre-tokenizer."""
        from tokenizers import Regex, normalizers, pre_tokenizers

        if self.nfc:
            backend.normalizer = normalizers.NFC()
        steps = [pre_tokenizers.Split(Regex(split), "isolated") for split in self.splits]
        alphabet = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([*steps, alphabet])


_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s+(?!\S)|\s+"
_LINES = r"\s*[\r\n]+"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_MARKS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
# Words that end where lower case turns to upper case, as GPT-4o's: (optional mark, UPPER, lower).
_UPPER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}"
_LOWER = r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_MARKS_AND_SLASHES = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_ONE_DIGIT = r"\p{N}"
_THREE_DIGITS = r"\p{N}{1,3}"
_CJK = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"


def _any(*patterns: str) -> str:
    return "|".join(patterns)


def _cased(suffix: str, upper: str = _UPPER, lower: str = _LOWER) -> str:
    mark = r"[^\r\n\p{L}\p{N}]?"
    return f"{mark}[{upper}]*[{lower}]+{suffix}|{mark}[{upper}]+[{lower}]*{suffix}"


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = _any(_CONTRACTION, _WORD, _THREE_DIGITS, _MARKS, _LINES, _SPACES)
_QWEN2 = _any(_CONTRACTION, _WORD, _ONE_DIGIT, _MARKS, _LINES, _SPACES)
_QWEN35 = _any(
    _CONTRACTION,
    r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+",
    _ONE_DIGIT,
    r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*",
    _LINES,
    _SPACES,
)
_GPT4O = _any(_cased(f"{_CONTRACTION}?"), _THREE_DIGITS, _MARKS_AND_SLASHES, _LINES, _SPACES)
_TEKKEN = _any(_cased(""), _ONE_DIGIT, _MARKS_AND_SLASHES, _LINES, _SPACES)
_YOUTU = _any(_cased(f"{_CONTRACTION}?"), _ONE_DIGIT, _MARKS_AND_SLASHES, _LINES, _SPACES)
_KIMI = _any(
    r"\p{Han}+",
    _cased(f"{_CONTRACTION}?", rf"{_UPPER}&&[^\p{{Han}}]", rf"{_LOWER}&&[^\p{{Han}}]"),
    _THREE_DIGITS,
    _MARKS,
    _LINES,
    _SPACES,
)
_JAIS2 = _any(
    _CONTRACTION,
    _WORD,
    _THREE_DIGITS,
    _MARKS,
    _LINES,
    *[rf"\s{{{n}}}(?!\S)" for n in (512, 256, 128, 64, 32, 16, 8, 4)],
    r"\s{1,2}(?!\S)|\s{1}",
)
_BAILING = _any(
    r"'(?i:[sdmt]|ll|ve|re)",
    r"[^\r\n\p{L}\p{N}]?+\p{L}+",
    _ONE_DIGIT,
    r" ?[^\s\p{L}\p{N}]++[\r\n]*",
    r"\s*[\r\n]",
    _SPACES,
)
_SEED_CODER = _any(_CONTRACTION, _WORD, _ONE_DIGIT, r" ?[^\s\p{L}\p{N}\r\n]+", _LINES, _SPACES)
_EXAONE_MOE = _any(
    _CONTRACTION,
    r"[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+",
    _ONE_DIGIT,
    r" ?[^\s\p{L}\p{N}]+[\r\n/]?",
    r"\s*[\r\n]",
    _SPACES,
)
_DEEPSEEK3_START = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
    r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
)
_DEEPSEEK3 = (
    _THREE_DIGITS,
    _CJK,
    _any(_DEEPSEEK3_START, r" ?[\p{P}\p{S}]+[\r\n]*", _LINES, _SPACES),
)
_BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_DEEPSEEK_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
# The cased letters of Unicode 12 or so, as the original spells them out.
_DEEPSEEK_LETTERS = (
    "A-Za-z"
    "\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af"
    "\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1"
    "\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5"
    "\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a"
    "\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    "\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3"
    "\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115"
    "\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149"
    "\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d"
    "\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06"
    "\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df"
    "\U0001e900-\U0001e943"
)

_GPT2_KIND = PreTokenizer(splits=(_GPT2,))
_DIGITS_KIND = PreTokenizer(splits=(_ONE_DIGIT, _GPT2))
_LLAMA3_KIND = PreTokenizer(splits=(_LLAMA3,), ignore_merges=True, adds_bos=True)
_LLAMA3_PLAIN = PreTokenizer(splits=(_LLAMA3,))
_QWEN2_KIND = PreTokenizer(splits=(_QWEN2,), nfc=True)
_QWEN2_PLAIN = PreTokenizer(splits=(_QWEN2,))
_GPT4O_KIND = PreTokenizer(splits=(_GPT4O,))
_DEEPSEEK3_KIND = PreTokenizer(splits=_DEEPSEEK3)
_BLOOM_KIND = PreTokenizer(splits=(_BLOOM,))
_BAILING_KIND = PreTokenizer(splits=(_BAILING,))
_AYA_KIND = PreTokenizer(splits=(r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O))
_NEOX_KIND = PreTokenizer(splits=(_GPT2,), nfc=True)
_GLM4_KIND = PreTokenizer(splits=(_LLAMA3,), ignore_merges=True)

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "a.x-4.0": _GPT2_KIND,
    "afmoe": PreTokenizer(
        splits=(
            # Digits in threes, counted from the right.
            r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))",
            "[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f"
            "\u2f00-\u2fdf\u0e40-\u0e7f\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f"
            "\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+",
            _DEEPSEEK3[2],
        )
    ),
    "bailingmoe": _BAILING_KIND,
    "bailingmoe2": _BAILING_KIND,
    "bloom": _BLOOM_KIND,
    "chameleon": PreTokenizer(
        splits=(
            "<sentinel:[0-9]+>",
            "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
            r"([\t\n]|    |  )",
            _ONE_DIGIT,
            r"[\p{P}!-/:-@\[-`{-~]",
            _GPT2,
        ),
        adds_bos=True,
    ),
    "chatglm-bpe": _LLAMA3_PLAIN,
    "codeshell": _DIGITS_KIND,
    "cohere2moe": _AYA_KIND,
    "command-r": PreTokenizer(splits=(_ONE_DIGIT, _GPT2), nfc=True),
    "dbrx": _LLAMA3_PLAIN,
    "deepseek-coder": PreTokenizer(
        splits=(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_CJK, _ONE_DIGIT)
    ),
    "deepseek-llm": PreTokenizer(
        splits=(
            r"[\r\n]",
            rf"\s?[{_DEEPSEEK_LETTERS}]+",
            "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
            r"\s+\z",
            _DEEPSEEK_CJK,
            r"\p{N}+",
        )
    ),
    "deepseek-r1-qwen": _QWEN2_KIND,
    "deepseek-v3": _DEEPSEEK3_KIND,
    "exaone": _DIGITS_KIND,
    "exaone-moe": PreTokenizer(splits=(_EXAONE_MOE,)),
    "exaone4": _GPT2_KIND,
    "f2llmv2": _QWEN2_KIND,
    "falcon": PreTokenizer(splits=(r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
    "falcon-h1": _LLAMA3_KIND,
    "falcon3": _LLAMA3_KIND,
    "gigachat": _GPT2_KIND,
    "glm4": _GLM4_KIND,
    "glm5": _GLM4_KIND,
    "gpt-2": _GPT2_KIND,
    "gpt-4o": _GPT4O_KIND,
    "gpt3-finnish": _BLOOM_KIND,
    "granite-docling": _GPT2_KIND,
    "granite-embed-multi-97m": PreTokenizer(splits=(_GPT4O,), ignore_merges=True),
    "grok-2": _QWEN2_PLAIN,
    "hunyuan": _QWEN2_PLAIN,
    "hunyuan-dense": _DEEPSEEK3_KIND,
    "hy_v4": _DEEPSEEK3_KIND,
    "jais": _GPT2_KIND,
    "jais-2": PreTokenizer(splits=(_JAIS2,)),
    "jina-de": _GPT2_KIND,
    "jina-es": _GPT2_KIND,
    "jina-v2-de": _GPT2_KIND,
    "jina-v2-es": _GPT2_KIND,
    "jina-v5-nano": _LLAMA3_KIND,
    "joyai-llm": _DEEPSEEK3_KIND,
    "kanana2": _GPT4O_KIND,
    "kimi-k2": PreTokenizer(splits=(_KIMI,)),
    "kormo": _QWEN2_PLAIN,
    "laguna": PreTokenizer(splits=(r"[^\n]+|[\n]+", _QWEN2)),
    "lfm2": _LLAMA3_KIND,
    "llada-moe": _BAILING_KIND,
    "llama-bpe": _LLAMA3_KIND,
    "llama-v3": _LLAMA3_KIND,
    "llama3": _LLAMA3_KIND,
    "llama4": _GPT4O_KIND,
    "megrez": _QWEN2_PLAIN,
    "mellum": _GPT2_KIND,
    "mellum2": _DIGITS_KIND,
    "midm-2.0": _LLAMA3_KIND,
    "minerva-7b": _DIGITS_KIND,
    "minicpm5": PreTokenizer(
        splits=(_THREE_DIGITS, _any(_CONTRACTION, _WORD, r"\p{N}+", _MARKS, _LINES, _SPACES)),
        ignore_merges=True,
    ),
    "minimax-m2": _GPT4O_KIND,
    "modern-bert": _GPT2_KIND,
    "mpt": _NEOX_KIND,
    "olmo": _NEOX_KIND,
    "phi-2": _GPT2_KIND,
    "pixtral": _LLAMA3_KIND,
    "poro-chat": _BLOOM_KIND,
    "qwen2": _QWEN2_KIND,
    "qwen35": PreTokenizer(splits=(_QWEN35,), nfc=True),
    "refact": _DIGITS_KIND,
    "seed-coder": PreTokenizer(splits=(_SEED_CODER,)),
    "smaug-bpe": _LLAMA3_PLAIN,
    "smollm": _DIGITS_KIND,
    "solar-open": _QWEN2_PLAIN,
    "spark2_5": PreTokenizer(
        splits=(
            _THREE_DIGITS,
            _CJK,
            _any(_DEEPSEEK3_START, r" ?[\p{P}\p{S}]+", r"[\r\n]", _SPACES),
            _ONE_DIGIT,
        )
    ),
    "stablelm2": _QWEN2_KIND,
    "starcoder": _DIGITS_KIND,
    "superbpe": PreTokenizer(splits=(r"\p{N}+", r"(?=(\d{3})+(?!\d))")),
    "talkie": _GPT4O_KIND,
    "tekken": PreTokenizer(splits=(_TEKKEN,), ignore_merges=True, adds_bos=True),
    "tiny_aya": _AYA_KIND,
    "trillion": _GPT2_KIND,
    "ufakzeka": PreTokenizer(splits=(_any(_WORD, _ONE_DIGIT, _MARKS, _LINES, _SPACES),)),
    "viking": PreTokenizer(splits=(_BLOOM, _ONE_DIGIT)),
    "youtu": PreTokenizer(
        splits=(
            "[\uac00-\ud7a3\u3131-\u318e]+"
            "|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f"
            "\ufe30-\ufe4f]+"
            f"|[\u3105-\u312f]+|{_CJK}",
            _YOUTU,
        ),
        ignore_merges=True,
    ),
}
