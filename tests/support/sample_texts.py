"""Texts that tokenizers get wrong."""

TEXTS = (
    "",
    " ",
    "Hello, world!",
    "  two  spaces\tand\n\n\nlines  ",
    "don't we'll I'M they'RE",
    "def f(x: int) -> int:\n    return x ** 2  # 12345 0x1F 3.14159\n",
    "Grüße, naïve café 中文字 日本語 한국어 العربية हिन्दी",
    "emoji 👩‍👩‍👧‍👦 🇩🇪 and e\u0301 as two code points",
    "\u00a0\u2003\u200b odd spaces",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>",
    "x <|im_end|> y <|nothing|> ",
    "½ ² Ⅷ ٣٤",
    "a" * 300,
    "\x00\x01\x7f",
)
