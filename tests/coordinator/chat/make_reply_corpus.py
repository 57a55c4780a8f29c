#!/usr/bin/env python3
"""Writes corpus/replies.json: replies as models of each family write them, and the OpenAI form that they must become.

Well-formed replies are written here from reasoning, text and calls by a renderer of each family's format, so that the expected
form is what the renderer was given. Damaged ones are made from those by hand-written rules, each with what a tolerant reader has
to make of it: whole calls count, what cannot be read is text, nothing is lost and no markup of a call that counts stays behind.

    python3 make_reply_corpus.py
"""

import json
import pathlib

HERE = pathlib.Path(__file__).resolve().parent

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                    "metric": {"type": "boolean"},
                    "where": {"type": "object"},
                    "tags": {"type": "array", "items": {"type": "string"}},
                },
            },
        },
    },
    {"type": "function", "function": {"name": "run code", "parameters": {"type": "object", "properties": {"source": {"type": "string"}}}}},
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
]


def think(reasoning):
    return "" if reasoning is None else f"<think>\n{reasoning}\n</think>\n\n"


def json_text(value):
    return json.dumps(value, ensure_ascii=False)


def hermes_call(name, arguments):
    return "<tool_call>\n" + json_text({"name": name, "arguments": arguments}) + "\n</tool_call>"


def qwen_call(name, arguments):
    out = f"<tool_call>\n<function={name}>\n"
    for key, value in arguments.items():
        out += f"<parameter={key}>\n{value if isinstance(value, str) else json_text(value)}\n</parameter>\n"
    return out + "</function>\n</tool_call>"


def glm_call(name, arguments):
    out = f"<tool_call>{name}\n"
    for key, value in arguments.items():
        out += f"<arg_key>{key}</arg_key>\n<arg_value>{value if isinstance(value, str) else json_text(value)}</arg_value>\n"
    return out + "</tool_call>"


def one_by_one(call):
    return lambda calls: "\n".join(call(name, arguments) for name, arguments in calls)


def dsml(space, block):
    tag = "｜DSML｜" + space

    def write(calls):
        out = f"<{tag}{block}>\n"
        for name, arguments in calls:
            out += f'<{tag}invoke name="{name}">\n'
            for key, value in arguments.items():
                is_string = isinstance(value, str)
                text = value if is_string else json_text(value)
                out += f'<{tag}parameter name="{key}" string="{str(is_string).lower()}">{text}</{tag}parameter>\n'
            out += f"</{tag}invoke>\n"
        return out + f"</{tag}{block}>"

    return write


# family: (what its template shows of the format, the renderer of calls)
FORMATS = {
    "qwen3": ("<think></think><tool_call>\n{\"name\": ", one_by_one(hermes_call)),
    "qwen3_5": ("<think></think><tool_call>\n<function=", one_by_one(qwen_call)),
    "nemotron_h": ("<think></think><tool_call>\n<function=", one_by_one(qwen_call)),
    "glm5_next": ("<think></think><tool_call>{name}<arg_key>", one_by_one(glm_call)),
    "deepseek_v4": ("<think></think><｜DSML｜tool_calls>", dsml("", "tool_calls")),
    "deepseek_v41": ("<think></think><｜DSML｜ calls>", dsml(" ", "calls")),
}

# What a history with calls looks like in each format: the part of a template that writes an assistant's turn.
HERMES_TURN = (
    "{{ m.content }}{% for c in m.tool_calls %}{{ '\\n' if m.content or not loop.first }}<tool_call>\n"
    "{\"name\": {{ c.function.name | tojson }}, \"arguments\": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}"
)
QWEN_TURN = (
    "{{ m.content }}{% for c in m.tool_calls %}{{ '\\n' if m.content or not loop.first }}<tool_call>\n<function={{ c.function.name }}>{{ '\\n' }}"
    "{% for k, v in c.function.arguments.items() %}<parameter={{ k }}>{{ '\\n' }}{{ v if v is string else v | tojson }}{{ '\\n' }}</parameter>{{ '\\n' }}{% endfor %}"
    "</function>{{ '\\n' }}</tool_call>{% endfor %}"
)
GLM_TURN = (
    "{{ m.content }}{% for c in m.tool_calls %}{{ '\\n' if m.content or not loop.first }}<tool_call>{{ c.function.name }}{{ '\\n' }}"
    "{% for k, v in c.function.arguments.items() %}<arg_key>{{ k }}</arg_key>{{ '\\n' }}<arg_value>{{ v if v is string else v | tojson }}</arg_value>{{ '\\n' }}{% endfor %}"
    "</tool_call>{% endfor %}"
)
TURNS = {"qwen3": HERMES_TURN, "qwen3_5": QWEN_TURN, "nemotron_h": QWEN_TURN, "glm5_next": GLM_TURN}

# (name, reasoning, text, calls)
CASES = [
    ("text", None, "Hello there.", []),
    ("reasoning", "Two and two.\n\nFour.", "4", []),
    ("call", None, "", [("get_weather", {"city": "Bergen"})]),
    ("no arguments", None, "", [("now", {})]),
    ("reasoning, text, call", "I need the weather.", "Looking it up.", [("get_weather", {"city": "Oslo", "days": 3})]),
    ("two calls", None, "", [("get_weather", {"city": "Oslo"}), ("get_weather", {"city": "Tromsø", "metric": True})]),
    ("three tools", "All of them.", "", [("now", {}), ("get_weather", {"city": "x", "days": -1}), ("run code", {"source": "1"})]),
    ("nested values", None, "", [("get_weather", {"where": {"lat": 60.39, "box": [[1, 2], [3, 4]]}, "tags": ["a", "b \"c\""]})]),
    ("many lines", None, "", [("run code", {"source": "def f(x):\n    if x < 3 and x > 1:\n        return \"</b>\"\n\n    return {}"})]),
    ("other scripts", "考える", "はい", [("get_weather", {"city": "東京 🎉 \\ \t größer"})]),
    ("a string that looks like a number", None, "", [("get_weather", {"city": "12"})]),
    ("empty string", None, "", [("get_weather", {"city": ""})]),
    ("false and null in an object", None, "", [("get_weather", {"metric": False, "where": {"a": None}})]),
]


def events(reasoning, text, calls):
    out = []
    if reasoning:
        out.append({"reasoning": reasoning})
    if text:
        out.append({"text": text})
    for name, arguments in calls:
        out.append({"call": name, "arguments": arguments})
    return out


def well_formed():
    for family, (shows, write) in FORMATS.items():
        for name, reasoning, text, calls in CASES:
            parts = [part for part in (text, write(calls) if calls else "") if part]
            separator = "\n\n" if family == "deepseek_v41" else "" if family == "deepseek_v4" else "\n"
            yield {"name": f"{family}: {name}", "family": family, "shows": shows, "reply": think(reasoning) + separator.join(parts), "events": events(reasoning, text, calls)}


OSLO = ("get_weather", {"city": "Oslo", "days": 3})
NOW = ("now", {})


def damaged():
    def entry(family, name, reply, expected):
        return {"name": f"{family}: {name}", "shows": FORMATS[family][0], "reply": reply, "events": expected}

    def text(s):
        return {"text": s}

    for family, (_, write) in FORMATS.items():
        call, now = write([OSLO]), write([NOW])
        oslo = {"call": OSLO[0], "arguments": OSLO[1]}
        now_event = {"call": "now", "arguments": {}}
        half = call[: call.index("Oslo") + 2]
        # Cut in the middle of a value: the client must see what was there, as text.
        yield entry(family, "cut inside a value", half, [text(half)])
        yield entry(family, "text, then cut inside a value", "Wait.\n" + half, [text("Wait.\n" + half)])
        # The reply ended before the last tag, with everything said.
        yield entry(family, "closing tag missing", call[: call.rindex("</")], [oslo])
        yield entry(family, "closing tag cut", call[: call.rindex("</") + 4], [oslo])
        yield entry(family, "call inside reasoning that never ends", "<think>\nI must look.\n" + call, [{"reasoning": "I must look."}, oslo])
        yield entry(family, "call inside reasoning that ends", f"<think>\nMaybe {now} no.\n</think>\n\nNo.", [{"reasoning": f"Maybe {now} no."}, text("No.")])
        yield entry(family, "text between and after calls", call + "\nand\n" + now + "\ndone", [oslo, text("and"), now_event, text("done")])
        yield entry(family, "reasoning opened twice", "<think>\n<think>\na\n</think>\n\nb", [{"reasoning": "<think>\na"}, text("b")])
        yield entry(family, "reasoning never closed", "<think>\nabc", [{"reasoning": "abc"}])
        yield entry(family, "markup that is no call", "Use <tool_call> or <｜DSML｜ in your reply.", [text("Use <tool_call> or <｜DSML｜ in your reply.")])
        yield entry(family, "closing tags alone", "a </tool_call> b </｜DSML｜tool_calls> c", [text("a </tool_call> b </｜DSML｜tool_calls> c")])
    good = qwen_call(*NOW)
    now_event = {"call": "now", "arguments": {}}
    weather = {"call": "get_weather", "arguments": {"city": "Oslo"}}
    # Hermes JSON
    yield entry("qwen3", "one brace too many", '<tool_call>\n{"name": "now", "arguments": {}}}\n</tool_call>', [now_event])
    yield entry("qwen3", "one brace too few", '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}\n</tool_call>', [weather])
    yield entry("qwen3", "arguments as a string", '<tool_call>\n{"name": "get_weather", "arguments": "{\\"city\\": \\"Oslo\\"}"}\n</tool_call>', [weather])
    yield entry("qwen3", "line break in a string", '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Os\nlo"}}\n</tool_call>', [{"call": "get_weather", "arguments": {"city": "Os\nlo"}}])
    yield entry("qwen3", "no name", '<tool_call>\n{"arguments": {}}\n</tool_call>', [text('<tool_call>\n{"arguments": {}}\n</tool_call>')])
    # Qwen's tags
    yield entry("qwen3_5", "parameter not closed", "<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n</function>\n</tool_call>", [weather])
    yield entry("qwen3_5", "function not closed", "<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n</tool_call>\n" + good, [weather, now_event])
    yield entry("qwen3_5", "a closing tag inside a value", "<tool_call>\n<function=run code>\n<parameter=source>\nprint('</tool_call></function>')\n</parameter>\n</function>\n</tool_call>", [{"call": "run code", "arguments": {"source": "print('</tool_call></function>')"}}])
    yield entry("qwen3_5", "no name", "<tool_call>\n<function=>\n</function>\n</tool_call>\n" + good, [text("<tool_call>\n<function=>\n</function>\n</tool_call>"), now_event])
    # GLM's keys
    yield entry("glm5_next", "value not closed", "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Oslo\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>", [{"call": OSLO[0], "arguments": OSLO[1]}])
    yield entry("glm5_next", "last value not closed", "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Oslo\n</tool_call>\n" + glm_call(*NOW), [weather, now_event])
    yield entry("glm5_next", "key not closed", "<tool_call>get_weather\n<arg_key>city\n<arg_value>Oslo</arg_value>\n</tool_call>", [weather])
    yield entry("glm5_next", "no line breaks", "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Oslo</arg_value></tool_call>", [weather])
    yield entry("glm5_next", "closing tags inside a value", "<tool_call>run code\n<arg_key>source</arg_key>\n<arg_value>a</arg_value> b</tool_call> c</arg_value>\n</tool_call>", [{"call": "run code", "arguments": {"source": "a</arg_value> b</tool_call> c"}}])
    yield entry("glm5_next", "JSON instead", '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>', [weather])
    yield entry("glm5_next", "value without key", "<tool_call>f\n<arg_value>1</arg_value>\n</tool_call>", [text("<tool_call>f\n<arg_value>1</arg_value>\n</tool_call>")])
    yield entry("glm5_next", "number that is none", "<tool_call>get_weather\n<arg_key>days</arg_key>\n<arg_value>many</arg_value>\n</tool_call>", [{"call": "get_weather", "arguments": {"days": "many"}}])
    # DeepSeek's markup
    open_, close = "<｜DSML｜", "</｜DSML｜"
    invoke = f'{open_}invoke name="get_weather">\n{open_}parameter name="city" string="true">Oslo{close}parameter>\n{close}invoke>'
    yield entry("deepseek_v4", "no block around the call", invoke, [weather])
    yield entry("deepseek_v4", "parameter not closed", f'{open_}tool_calls>\n{open_}invoke name="get_weather">\n{open_}parameter name="city" string="true">Oslo\n{close}invoke>\n{close}tool_calls>', [weather])
    yield entry("deepseek_v4", "first parameter not closed", f'{open_}tool_calls>\n{open_}invoke name="get_weather">\n{open_}parameter name="city" string="true">Oslo\n{open_}parameter name="days" string="false">3{close}parameter>\n{close}invoke>\n{close}tool_calls>', [{"call": OSLO[0], "arguments": OSLO[1]}])
    yield entry("deepseek_v4", "second call cut", f'{open_}tool_calls>\n{invoke}\n{open_}invoke name="now', [weather, text(f'{open_}invoke name="now')])
    yield entry("deepseek_v4", "block not closed", f"{open_}tool_calls>\n{invoke}\n", [weather])
    yield entry("deepseek_v4", "type not said", f'{open_}tool_calls>\n{open_}invoke name="get_weather">\n{open_}parameter name="days">3{close}parameter>\n{close}invoke>\n{close}tool_calls>', [{"call": "get_weather", "arguments": {"days": 3}}])
    yield entry("deepseek_v4", "number that is none", f'{open_}tool_calls>\n{open_}invoke name="get_weather">\n{open_}parameter name="days" string="false">many{close}parameter>\n{close}invoke>\n{close}tool_calls>', [{"call": "get_weather", "arguments": {"days": "many"}}])
    yield entry("deepseek_v4", "closing tag inside a value", f'{open_}tool_calls>\n{open_}invoke name="run code">\n{open_}parameter name="source" string="true">a{close}parameter> b {close}tool_calls> c{close}parameter>\n{close}invoke>\n{close}tool_calls>', [{"call": "run code", "arguments": {"source": f"a{close}parameter> b {close}tool_calls> c"}}])
    yield entry("deepseek_v4", "no name", f"{open_}tool_calls>\n{open_}invoke>\n{close}invoke>\n{close}tool_calls>", [text(f"{open_}tool_calls>\n{open_}invoke>\n{close}invoke>\n{close}tool_calls>")])
    yield entry("deepseek_v41", "written without the space", f"{open_}tool_calls>\n{invoke}\n{close}tool_calls>", [weather])


def main():
    corpus = {"tools": TOOLS, "turns": {f: "{% for m in messages %}" + t + "{% endfor %}" for f, t in TURNS.items()}, "well_formed": list(well_formed()), "damaged": list(damaged())}
    path = HERE / "corpus" / "replies.json"
    path.write_text(json.dumps(corpus, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    print(f"{path.name}: {len(corpus['well_formed'])} well-formed, {len(corpus['damaged'])} damaged")


main()
