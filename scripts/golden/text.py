#!/usr/bin/env python3
"""Writes tests/golden/text/: what the original tokenizer library, Jinja2 and Python's json say about generated inputs.

    pip install tokenizers==0.23.3 jinja2==3.1.6
    python3 scripts/golden/text.py tests/golden/text

Output is the same on every run. Files are ASCII (other characters escaped), so that no tool takes U+2028 for a line end.
"""
import json
import math
import os
import random
import struct
import sys
import unicodedata

import jinja2
import jinja2.ext
import tokenizers
from jinja2.sandbox import ImmutableSandboxedEnvironment

MODEL = "models/lily-tiny"


def write(folder, name, rows):
    with open(os.path.join(folder, name), "w", encoding="ascii") as out:
        for row in rows:
            out.write(json.dumps(row) + "\n")


# Text ---------------------------------------------------------------------------------------------------------------

FIXED = [
    "cafe\u0301s ok", "नमस्ते दुनिया", "x\u0301 \u0301y", "2026-04-17 v12", "a  \n\n  b", "x\t\ty \r\n z   ", " !!??\n\nx=y;",
    "Hello, world!", "中文测试：こんにちは。", "I'm 1234, we're coding.", "  one\nTwo... 42!\t", "caf\u00e9", "雪 😀 café e\u0301",
    "\u0301!I", "Caffè già, perché l'AI è utile.", "'\u017fab", "x'\u017f 'LL 'Re", "'lL'vE'D'm", "it's'sx", "''s", "' s", "'l", "'r'e",
    "\u2028", "\u2029x", "\u0085a", "\u00a0b", "\u1680c", "\u180ed", "\u200be", "\u3000f", "\x0b\x0cg", "\x1c\x1dh", "\n'sa", "\r'll",
    " \u0301", "\n\u0301", "1\u0301", "\u0301" * 5, "\u0661\u0662", "\u2167x", "\u00bd", "a\u00b2b", "!\r\n\r\na", "! \n", "!\t\n", "  !", "\t!",
    " 1", "  1", " \n 1", "\n\n 1", "  ", " \n", "\n ", "a \n\n ", "\u00a0\u00a0x", "\u00a0 x", " \u00a0!", "\ufeffa", "\U00016d40\U00010d4a",
    "가\u1100\u1161\u11a8", "\u0958", "\u2126\u212b", "\u1e9b\u0323", "\u0344", "\u0f73\u0f75", "\ufb1d\ufb4e", "\u0340\u0341", "e\u0323\u0301\u0302",
]
ALPHABET = (
    list("aZsStTmMdDlLrReEvV'''  \n\n\r\t!?.-_<>|=/\"09")
    + ["  ", "\r\n", "\u00a0", "\u3000", "\u2028", "\u0085", "\u017f", "\u00e9", "\u0301", "\u0323", "\u0307", "\u093f", "\u0e31", "é", "ß", "Ж"]
    + ["字", "한", "\u1112\u1161\u11ab", "あ", "א\u05b4", "٣", "½", "Ⅳ", "😀", "👩\u200d💻", "\ufe0f", "\u200b", "€", "…", "。", "\x00", "\x1f", "\x7f"]
    + ["the", " and", "function", "return", "</", "think>", "<|im_", "end|>", "I'm", "we'll", "2024"]
)


def texts(seed, n, longest):
    r = random.Random(seed)
    out = list(FIXED)
    assigned = [c for c in range(0x20, 0x20000) if not 0xD800 <= c < 0xE000 and unicodedata.category(chr(c)) != "Cn"]
    while len(out) < n:
        if r.random() < 0.25:  # any assigned characters, from a few neighbourhoods so that marks meet their letters
            base = r.randrange(len(assigned) - 60)
            out.append("".join(chr(assigned[base + r.randrange(60)]) for _ in range(r.randint(1, 20))))
        else:
            out.append("".join(r.choice(ALPHABET) for _ in range(r.randint(1, longest))))
    return out


def split_rows():
    pattern = json.load(open(f"{MODEL}/tokenizer.json", encoding="utf-8"))["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"]
    splitter = tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
    for text in texts(1, 600, 24):
        yield {"text": text, "pieces": [piece for piece, _ in splitter.pre_tokenize_str(text)]}


def token_rows():
    model = tokenizers.Tokenizer.from_file(f"{MODEL}/tokenizer.json")
    for text in texts(2, 600, 40):
        encoding = model.encode(text, add_special_tokens=False)
        yield {"text": text, "ids": encoding.ids, "decoded": model.decode(encoding.ids, skip_special_tokens=True)}


def nfc_rows():
    for text in texts(3, 500, 24):
        yield {"text": text, "nfc": unicodedata.normalize("NFC", text)}


# JSON ---------------------------------------------------------------------------------------------------------------


def json_rows():
    r = random.Random(4)
    numbers = ["0", "-0", "0.0", "-0.0", "1", "-1", "1.0", "1e0", "1E5", "1e15", "1e16", "1e17", "123456789012345678", "1e-4", "1e-5", "0.0001", "0.00001",
               "12345678901234567890", "-9223372036854775808", "-9223372036854775809", "18446744073709551615", "18446744073709551616",
               "123456789012345678901234567890123456789", "-99999999999999999999999999", "0.1", "0.30000000000000004", "5e-324", "1.7976931348623157e308",
               "2.2250738585072014e-308", "123456789.123456789", "1e22", "1e23", "9007199254740993", "9007199254740993.0", "100000000000000000000.0", "1.10", "2.5e-7"]
    while len(numbers) < 400:
        x = struct.unpack("d", struct.pack("Q", r.getrandbits(64)))[0]
        numbers.append(repr(x if math.isfinite(x) and r.random() < 0.5 else r.uniform(-1, 1) * 10 ** r.randint(-8, 20)))
    documents = list(numbers)
    documents += ['""', '"é\\u00e9\\ud83d\\ude00"', '"\\"\\\\\\/\\b\\f\\n\\r\\t"', '"\\u0000\\u001f\\u007f\\u0080\\u2028"', '"<b> & \'x\' 東京"', "[]", "{}", "[[],{}]", "true", "false", "null",
                  '{"b": 1, "a": [1, "ä", {"k": [true, null]}], "": {}}', '{"a": 1, "b": 2, "a": 3}', ' [ 1 ,2 ,\n 3 ] ', '{"o":{"a":{"b":"é\\"q\\""}}}']
    for text in documents:
        yield {"json": text, "dumped": json.dumps(json.loads(text), ensure_ascii=False)}


# Chat template ------------------------------------------------------------------------------------------------------


def template():
    def raise_exception(message):
        raise jinja2.exceptions.TemplateError(message)

    def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols])
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    with open(f"{MODEL}/chat_template.jinja", encoding="utf-8", newline="") as file:
        return environment.from_string(file.read())


def chats(n):
    r = random.Random(5)
    words = ["alpha", "beta", " ", "\n", "\n\n", "<think>", "</think>", "<think>\ninner\n</think>\n\n", "<tool_response>", "</tool_response>", "é", "\u3000", "\x1c", "東京", "'", "a  b", "\t", ""]

    def text():
        return "".join(r.choice(words) for _ in range(r.randint(0, 5)))

    def content(role):
        k = r.random()
        if k < 0.08:
            return None
        if k < 0.2:
            return [{"type": "text", "text": text()} for _ in range(r.randint(0, 3))]
        if k < 0.24 and role != "assistant":
            return [{"type": "text", "text": text()}, r.choice([{"type": "image", "image": "x"}, {"type": "image_url", "image_url": {"url": "y"}}, {"type": "video", "video": "z"}])]
        if k < 0.34 and role == "user":
            return "<tool_response>" + text() + "</tool_response>"
        return text()

    def value(depth=0):
        options = [lambda: text(), lambda: r.randint(-5, 10 ** r.randint(1, 30)), lambda: r.uniform(-1e6, 1e6), lambda: r.choice([True, False, None]), lambda: "null"]
        if depth < 2:
            options += [lambda: [value(depth + 1) for _ in range(r.randint(0, 3))], lambda: {r.choice("abcdé") : value(depth + 1) for _ in range(r.randint(0, 3))}]
        return r.choice(options)()

    def call():
        body = {"name": r.choice(["f", "get_weather", "größe"])}
        if r.random() < 0.9:
            body["arguments"] = {r.choice(["a", "b", "city", "ü"]): value() for _ in range(r.randint(0, 4))}
        return body if r.random() < 0.2 else {"type": "function", "id": "c", "function": body}

    def message():
        role = r.choice(["user", "user", "assistant", "assistant", "tool"])
        m = {"role": role, "content": content(role)}
        if role == "assistant":
            if r.random() < 0.3:
                m["reasoning_content"] = r.choice([text(), None, ""])
            if r.random() < 0.4:
                m["tool_calls"] = [call() for _ in range(r.randint(0, 3))]
        return m

    for i in range(n):
        messages = [message() for _ in range(r.randint(1, 8))]
        if r.random() < 0.7:
            messages.insert(0, {"role": "user", "content": content("user")})
        if r.random() < 0.4:
            messages.insert(0, {"role": "system", "content": content("system")})
        if r.random() < 0.03:
            messages.insert(r.randint(0, len(messages)), {"role": r.choice(["system", "developer", "function"]), "content": "s"})
        kwargs = {"add_generation_prompt": r.random() < 0.6}
        for key, chance in (("enable_thinking", 0.4), ("preserve_thinking", 0.3), ("add_vision_id", 0.3)):
            if r.random() < chance:
                kwargs[key] = r.random() < 0.5
        tools = [{"type": "function", "function": {"name": r.choice("xyz"), "description": text(), "parameters": value()}} for _ in range(r.randint(0, 2))] if r.random() < 0.4 else None
        yield {"name": f"random {i}", "messages": messages, "tools": tools, "kwargs": kwargs}


def chat_rows():
    jinja = template()
    for case in chats(240):
        try:
            case["text"] = jinja.render(messages=case["messages"], tools=case["tools"], **case["kwargs"])
        except (jinja2.exceptions.TemplateError, TypeError) as error:
            case["error"] = str(error)
        yield case


def main():
    folder = sys.argv[1]
    write(folder, "splits.jsonl", split_rows())
    write(folder, "tokens.jsonl", token_rows())
    write(folder, "nfc.jsonl", nfc_rows())
    write(folder, "json_dumps.jsonl", json_rows())
    write(folder, "chats.jsonl", chat_rows())


if __name__ == "__main__":
    main()
