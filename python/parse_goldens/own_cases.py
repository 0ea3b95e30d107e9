"""Cases of a single format: alternative ways to write a call, and mistakes."""

WEATHER_CITY = "<arg_key>city</arg_key><arg_value>Paris</arg_value>"
DSML_CITY = '<｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>'


def qwen3_coder(inner):
    return f"<tool_call>\n<function=get_weather>\n{inner}\n</function>\n</tool_call>"


def dsml(block, inner, name="get_weather"):
    return (
        f'<｜DSML｜{block}>\n<｜DSML｜invoke name="{name}">\n{inner}\n</｜DSML｜invoke>\n'
        f"</｜DSML｜{block}>"
    )


def minimax(inner):
    return f"<minimax:tool_call>\n{inner}\n</minimax:tool_call>"


def gemma(inner, name="set_values"):
    return f"<|tool_call>call:{name}{inner}<tool_call|>"


def kimi(*calls):
    return f"<|tool_calls_section_begin|>{''.join(calls)}<|tool_calls_section_end|>"


def kimi_call(id, arguments='{"city": "Paris"}'):
    return f"<|tool_call_begin|>{id}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"


def dsml_cases(block):
    """Returns the cases of DeepSeek V3.2 and V4, which differ in the name of the block."""
    parameter = '<｜DSML｜parameter name="{}"{}>{}</｜DSML｜parameter>'
    return [
        dsml(block, parameter.format("city", "", "Paris")),
        dsml(block, parameter.format("count", "", "5"), "set_values"),
        dsml(block, parameter.format("count", ' string="maybe"', "5"), "set_values"),
        dsml(block, parameter.format("count", ' string="true"', "5"), "set_values"),
        dsml(block, parameter.format("note", ' string="false"', "5"), "set_values"),
        dsml(block, parameter.format("note", ' string="false"', "five"), "set_values"),
        dsml(block, parameter.format("arguments", ' string="false"', '{"city": "Paris"}')),
        dsml(block, parameter.format("arguments", ' string="true"', '{"city": "Paris"}')),
        dsml(block, parameter.format("input", ' string="false"', '{"city": "Paris"}')),
        dsml(block, parameter.format("input", ' string="false"', '{"other": "Paris"}')),
        dsml(block, parameter.format("arguments", ' string="false"', '{"x": 1}'), "unknown"),
        dsml(block, parameter.format("city", " string='true'", "Paris")),
        dsml(block, DSML_CITY + DSML_CITY.replace("Paris", "Rome")),
        dsml(
            block,
            '<｜DSML｜parameter name="city" string="true">Paris<｜DSML｜parameter name="unit" '
            'string="true">celsius'
            "</｜DSML｜parameter>",
        ),
        dsml(block, '<｜DSML｜parameter name="city" string="true">Paris'),
        dsml(block, "Paris"),
        dsml(block, DSML_CITY).replace(f"<｜DSML｜{block}>", "<｜DSML｜tool>", 1),
        dsml(block, DSML_CITY).replace(f"<｜DSML｜{block}>", "<｜DSML｜toolcalls>", 1),
        dsml("tool_calls" if block == "function_calls" else "function_calls", DSML_CITY),
        f'<｜DSML｜invoke name="get_weather">{DSML_CITY}',
        f'<｜DSML｜{block}><｜DSML｜invoke name="get_weather">{DSML_CITY}</｜DSML｜{block}>',
        f'<｜DSML｜{block}><｜DSML｜invoke name="get_weather"/></｜DSML｜{block}>',
        (
            f"<｜DSML｜{block}><｜DSML｜invoke name='get_weather'>{DSML_CITY}</｜DSML｜invoke>"
            f"</｜DSML｜{block}>"
        ),
        '<tool_calls><invoke name="get_weather"></invoke></tool_calls>',
        dsml(block, DSML_CITY) + "\n" + dsml(block, DSML_CITY) + "end",
    ]


def python_cases(begin, end):
    """Returns the cases of the two formats with calls in Python's syntax."""
    return [
        begin + text + end
        for text in [
            '[get_weather(city="Paris")]',
            "[get_weather(city='Paris', )]",
            "[get_weather('Paris')]",
            "[get_weather(**{'city': 'Paris'})]",
            "[get_weather(city='Paris'),]",
            "[ get_weather( city = 'Paris' ) ]",
            "get_weather(city='Paris')",
            "(get_weather(city='Paris'), now())",
            "[]",
            "[now]",
            "[now()]; [now()]",
            "[now(), 5]",
            "[weather.get(city='Paris')]",
            "[f()(x=1)]",
            "[a[0](x=1)]",
            "[set_values(a=None, b=True, c=False, d=null, e=true, f=false)]",
            "[set_values(a=-1, b=+2.5, c=1e5, d=0x10, e=1_000, g=0o7, h=1e999)]",
            "[set_values(a=1j)]",
            "[set_values(a=not True)]",
            "[set_values(a=~1)]",
            "[set_values(a={'x': [1, {'y': None}]}, b=(1, 2), c={1, 2}, d=[], e={}, f=())]",
            "[set_values(a={1: 2, None: 3, 'x': 4, 1.5: 5})]",
            "[set_values(a={**{'x': 1}})]",
            "[set_values(a=[*b])]",
            "[set_values(a='x' 'y', b='''long\ntext''')]",
            "[set_values(a=b'x')]",
            "[set_values(a=...)]",
            "[set_values(a=f'x', b=r'\\n', c=u'é')]",
            "[set_values(a=f'{x}')]",
            "[set_values(a=x)]",
            "[set_values(a=1 + 1)]",
            "[set_values(a=f(1))]",
            "[set_values(a=1, a=2)]",
            "[set_values(class=1)]",
            "[set_values(a='raw\nnewline')]",
            "[set_values(a='\\u676d\\x41\\N{BULLET}\\101\\q')]",
            "[set_values(a='\\ud800')]",
            "[set_values(a='it''s')]",
            '[set_values(a="it\'s", b=\'say "hi"\')]',
            "[get_weather(city='Paris')  # there\n]",
            "[get_weather(city='Paris')]\n[now()]",
            "[get_weather(city='Paris'),\n now()]",
            "[_private(x=1)]",
            "[get_weather_2(x=1)]",
            "[get2weather()]",
            "[now( )]",
            "[now(),now()]",
            "[write_file(path='a', content='])')]",
            "[write_file(path='a', content='x=1)')]",
            "[set_values(a=-True)]",
            "[set_values(a=--1)]",
            "[set_values(a=lambda: 1)]",
            "[set_values(a=1 if x else 2)]",
        ]
    ]


OWN_CASES = {
    "hermes": [
        '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>',
        (
            '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n'
            '</tool_call><tool_call>{"name": "now"'
        ),
        (
            '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}'
            '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
        ),
        "<tool_call></tool_call>",
        "<tool_call>",
        "<tool_call></tool_call>text",
        "<scratch_pad>hm</scratch_pad>Hello",
        '<tool_call>{"name": "now", "arguments": {}}</tool_call>\n<tool_call></tool_call>',
        '<TOOL_CALL>{"name": "now", "arguments": {}}</TOOL_CALL>',
    ],
    "qwen3_coder": [
        "<tool_call><function=get_weather><parameter=city>Paris</parameter></function></tool_call>",
        qwen3_coder("<parameter=city>\n\nParis\n\n</parameter>"),
        qwen3_coder("<parameter=city>  Paris\t</parameter>"),
        qwen3_coder("<parameter=city>\nParis\n<parameter=unit>\ncelsius\n</parameter>"),
        qwen3_coder("<parameter=city>\nParis\n"),
        qwen3_coder("< parameter = city >Paris< / parameter >"),
        qwen3_coder('<parameter="city">Paris</parameter>'),
        qwen3_coder("<parameter=>Paris</parameter>"),
        qwen3_coder("<parameter=city>\nRome\n</parameter><parameter=city>\nParis\n</parameter>"),
        qwen3_coder("<parameter=city>a</parameter> stray <parameter=unit>b</parameter>"),
        qwen3_coder("city: Paris"),
        qwen3_coder('{"city": "Paris"}'),
        qwen3_coder("<parameter=city>\r\nParis\r\n</parameter>"),
        "<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>",
        (
            "Sure.\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n"
            "</tool_call>"
        ),
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>',
        "<tool_call>\n<function=get_weather\n</tool_call>",
        "<tool_call>\n<function=get_weather</function>\n</tool_call>",
        "<tool_call>\n<function=get_weather<function=now>\n</function>\n</tool_call>",
        "<tool_call>\n<function=get_weather<tool_call>\n<function=now>\n</function>\n</tool_call>",
        "<tool_call>\n<function=get_weather>\n<function=now>\n</function>\n</tool_call>",
        "<tool_call>\n<function=>\n</function>\n</tool_call>",
        '<tool_call>\n<function="get_weather">\n</function>\n</tool_call>',
        "<tool_call>\n<function=now>\n</function>\n<function=ping>\n</function>\n</tool_call>",
        (
            "<tool_call>\n<function=now>\n</function>\n<tool_call>\n<function=ping>\n</function>\n"
            "</tool_call>"
        ),
        "<tool_call>\nno function\n</tool_call>\nafter",
    ],
    "llama3_json": [
        '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris"}}',
        "<|python_tag|>print(1)",
        '{"name": "now", "parameters": {}};{"name": "ping", "parameters": {}}',
        '{"name": "now", "parameters": {}}{"name": "ping", "parameters": {}}',
        '{"type": "function", "name": "now", "parameters": {}}',
        'Here is {"city": "Paris"} and more',
        "x = {1, 2}",
        '{"name": "now", "parameters": {}} or {"city": 1}',
        '{"name": "now", "parameters": {}} or {1, 2}',
        "{}",
        '{"name": "now", "parameters": {}} {',
        '```json\n{"name": "now", "parameters": {}}\n```',
        '{"name": "now", "parameters": {}}; {"name": "get_weather", "parameters": {"city": "Par',
    ],
    "llama4_pythonic": [
        *python_cases("", ""),
        *python_cases("<|python_start|>", "<|python_end|>")[:8],
        "<|python_start|>[now()]",
        "[now()]<|python_end|>",
        " <|python_start|>[now()]<|python_end|>",
    ],
    "pythonic": python_cases("", ""),
    "mistral_old": [
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}}]',
        '[TOOL_CALLS]{"name": "now", "arguments": {}}',
        '[{"name": "now", "arguments": {}}]',
        '[TOOL_CALLS][{"name": "now", "arguments": {}}] after',
        '[TOOL_CALLS][TOOL_CALLS][{"name": "now", "arguments": {}}]',
        '[TOOL_CALLS][{"name": "now", "arguments": {}}][TOOL_CALLS][{}]',
        "[TOOL_CALLS]",
        "[TOOL_CALLS] ",
        "[TOOL_CALLS][]",
        "[TOOL_CALLS][{}]",
        '[TOOL_CALLS][5, {"name": "now", "arguments": {}}]',
        '[TOOL_CALLS] so [{"name": "now", "arguments": {}}]',
        "[TOOL_CALLS]now{}",
        "[TOOL_CALLS]now[ARGS]{}",
        "a[TOOL_CALLS]b[TOOL_CALLS]c",
        '[TOOL_CALLS][{"name": "now", "arguments": "{}"}]',
        '[TOOL_CALLS][{"name": "now", "arguments": ""}]',
        '[TOOL_CALLS][{"name": "now"}, {"arguments": {}}]',
    ],
    "gemma4": [
        gemma("{}"),
        gemma("{ count: 5 , ratio : 1.50 }"),
        gemma('{note:<|"|>a<|"|> junk,count:1}'),
        gemma("{note:bare words,count:1}"),
        gemma("{count:}"),
        gemma("{count}"),
        gemma("{:5}"),
        gemma("{count:5,count:6}"),
        gemma('{<|"|>count<|"|>:5}'),
        gemma('{"note":"double"}'),
        gemma('{note:<|"|>open}'),
        gemma("{options:{depth:2,inner:{on:true}}}"),
        gemma("{options:{depth:2}"),
        gemma("{tags:[a,b]}"),
        gemma('{tags:[<|"|>a<|"|>,[1,2],{x:1}]}'),
        gemma('{tags:[<|"|>a<|"|>}'),
        gemma("{numbers:[1,2.5,true,null]}"),
        gemma("{anything:1.0,both:1e3,limit:null,enabled:true}"),
        gemma("(count:5)"),
        gemma("(note:(a))"),
        gemma("{note:a}b}"),
        gemma('{note:<|"|>{<|"|>,options:{name:<|"|>}<|"|>}}'),
        gemma("{]}"),
        gemma("{count:5,]}"),
        gemma("{a:b:c}"),
        gemma("{a:,b:1}"),
        gemma("{nested:[[[1]]]}"),
        gemma("{ratio:108.}"),
        gemma('{note:<|"|>line\nline<|"|>}'),
        gemma("{count:5}}"),
        gemma(" {count:5}"),
        "<|tool_call>:now{}<tool_call|>",
        "<|tool_call>now{}<tool_call|>",
        "<|tool_call>call:now<tool_call|>",
        "<|tool_call><tool_call|>",
        "call:now{}",
        "<|tool_call>call:now{}<|tool_call>call:ping{}<tool_call|>",
        "<|tool_call>call:a:b{}<tool_call|>",
        "<|tool_call>call: now {}<tool_call|>",
        "<|tool_call>call:now{}<tool_call|><|tool_response>",
    ],
    "functiongemma": [
        f"<start_function_call>call:{text}<end_function_call>"
        for text in [
            "set_values{count:5}",
            "set_values{count:5,note:<escape>a<escape>}",
            "set_values{count:<escape>5<escape>,note:<escape>x}",
            "set_values{options:{name:<escape>a<escape>}}",
            "set_values{tags:[<escape>a<escape>,<escape>b<escape>]}",
            "set_values(count:5)",
            "set_values",
            "set_values{note: <escape>a<escape>}",
            "set_values{a-b:<escape>1<escape>}",
            "set_values{note:<escape>}<escape>}",
            "set_values{note:<escape>1<escape>,note:<escape>2<escape>}",
            "a.b{}",
            "set_values {}",
            "{}",
            " set_values{}",
        ]
    ]
    + [
        "<start_function_call>set_values{}<end_function_call>",
        "<start_function_call>call:now{",
        "<start_function_call>call:now{} x",
        "<start_function_call>call:now{<start_function_call>call:ping{}<end_function_call>",
    ],
    "deepseek_v3": [
        (
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
            '{"city": "Paris"}\n```<｜tool▁call▁end｜>'
        ),
        (
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n"
            "{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
        ),
        (
            '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": '
            '"Paris"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
        ),
        (
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>other<｜tool▁sep｜>now\n```json\n{}\n"
            "```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
        ),
        (
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜><｜tool▁sep｜>now\n```json\n{}\n"
            "```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
        ),
        (
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>now \n```json \n{}\n"
            "```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
        ),
        (
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```\n"
            "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
        ),
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜>",
        "a<｜tool▁calls▁begin｜>b<｜tool▁calls▁end｜>c",
    ],
    "deepseek_v31": [
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜>",
        "a<｜tool▁calls▁begin｜>b<｜tool▁calls▁end｜>c",
        (
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜> now\n<｜tool▁sep｜>\n{}\n"
            "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
        ),
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜>",
        (
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n"
            "```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
        ),
    ],
    "deepseek_v32": dsml_cases("function_calls"),
    "deepseek_v4": dsml_cases("tool_calls"),
    "kimi_k2": [
        kimi(kimi_call("functions.get_weather:3")),
        kimi(kimi_call("get_weather:0")),
        kimi(kimi_call("functions.get_weather")),
        kimi(kimi_call("functions.get_weather:x")),
        kimi(kimi_call("functions.a.b:0")),
        kimi(kimi_call(" functions.get_weather:0 ")),
        kimi(kimi_call("functions.get_weather:0 more")),
        kimi(kimi_call(":0")),
        kimi(kimi_call("functions.:0")),
        kimi(kimi_call("")),
        kimi(kimi_call("functions.a:b:1")),
        kimi(kimi_call("functions.now:0", ""), kimi_call("functions.now:0", "{}")),
        kimi(kimi_call("call_abc")),
        kimi(kimi_call("call_abc"), kimi_call("functions.now:1", "{}")),
        kimi_call("functions.get_weather:0"),
        kimi("text", kimi_call("functions.now:0", "{}"), "text"),
        kimi(kimi_call("functions.now:0", "{}")) + kimi(kimi_call("functions.now:1", "{}")) + "end",
        kimi(kimi_call("functions.get_weather:0").removesuffix("<|tool_call_end|>")),
        kimi(kimi_call("functions.get_weather:0", " {} \n")),
        (
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.now:0<|tool_call_end|><|"
            "tool_calls_section_end|>"
        ),
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.now:0",
        "text<|tool_calls_section_begin|>",
        kimi() + "text",
    ],
    "glm45": [
        f"<tool_call>get_weather{WEATHER_CITY}</tool_call>",
        "<tool_call>now</tool_call>",
        "<tool_call>\nnow\n</tool_call>",
        "<tool_call></tool_call>after",
        f"<tool_call>{WEATHER_CITY}</tool_call>",
        f"<tool_call> get_weather {WEATHER_CITY} </tool_call>",
        (
            "<tool_call>get_weather<arg_key> city </arg_key> \n"
            " <arg_value> Paris </arg_value></tool_call>"
        ),
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</tool_call>",
        "<tool_call>get_weather<arg_key>city</tool_call>",
        "<tool_call>get_weather<arg_key>city</arg_key>Paris</tool_call>",
        "<tool_call>get_weather<arg_value>Paris</arg_value></tool_call>",
        f"<tool_call>get_weather{WEATHER_CITY}{WEATHER_CITY.replace('Paris', 'Rome')}</tool_call>",
        (
            f"<tool_call>get_weather\n{WEATHER_CITY} junk <arg_key>unit</arg_key><arg_value>"
            "celsius</arg_value></tool_call>"
        ),
        f"<tool_call>get_weather{WEATHER_CITY}<tool_call>now</tool_call>",
        '<tool_call>{"name": "now", "arguments": {}}</tool_call>',
        (
            "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>\nParis\n</arg_value>\n"
            "</tool_call>"
        ),
        "<tool_call>now</tool_call><tool_call>unknown</tool_call><tool_call>ping</tool_call>",
    ],
    "minimax_m2": [
        minimax('<invoke name="get_weather"><parameter name="city">Paris</parameter></invoke>'),
        minimax("<invoke name='get_weather'><parameter name='city'>Paris</parameter></invoke>"),
        minimax("<invoke name=get_weather><parameter name=city>Paris</parameter></invoke>"),
        minimax('<invoke name="now"></invoke><invoke name="ping"></invoke>'),
        minimax('<invoke name="now"/>'),
        minimax("hm"),
        minimax(
            '<invoke name="get_weather"><parameter name="city">Paris<parameter name="unit">'
            "celsius</parameter></invoke>"
        ),
        minimax('<invoke name="get_weather"><parameter name="city">Paris</invoke>'),
        minimax('<invoke name="get_weather">city: Paris</invoke>'),
        minimax(
            '<invoke name="get_weather"><parameter name="city">\n Paris \n</parameter></invoke>'
        ),
        minimax('<invoke name="get_weather"><parameter name="">Paris</parameter></invoke>'),
        minimax(
            '<invoke name="get_weather"><parameter  name = "city" >Paris</ parameter></invoke>'
        ),
        minimax(
            '<invoke name="get_weather"><parameter name="city">a</parameter><parameter '
            'name="city">b</parameter></invoke>'
        ),
        minimax('<invoke name="now">').replace("\n", ""),
        '<invoke name="now"></invoke>',
        "</minimax:tool_call>text",
        minimax('<invoke name="now"></invoke>')
        + "\n"
        + minimax('<invoke name="ping"></invoke>')
        + "\nend",
        minimax("<tool_code>now()</tool_code>"),
        minimax('<invoke name="now"></invoke> text <invoke name="ping"></invoke>'),
    ],
}
for key in ("mistral", "mistral_v11", "mistral_hf"):
    OWN_CASES[key] = [
        '[TOOL_CALLS]get_weather{"city": "Paris"}',
        "[TOOL_CALLS]now{}[TOOL_CALLS]ping{}",
        "[TOOL_CALLS]now",
        "[TOOL_CALLS]",
        "[TOOL_CALLS][ARGS]{}",
        '[TOOL_CALLS] get_weather [ARGS] {"city": "Paris"} ',
        '[TOOL_CALLS]get_weather[CALL_ID]abcdefghi[ARGS]{"city": "Paris"}',
        '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}}]',
        "[TOOL_CALLS][TOOL_CALLS]now[ARGS]{}",
        "[TOOL_CALLS]now[ARGS]{}[ARGS]{}",
        "[TOOL_CALLS]now[ARGS]{} text",
        "[TOOL_CALLS]now[ARGS]text",
        "[ARGS]{}",
        '[{"name": "now", "arguments": {}}]',
        '[TOOL_CALLS]now[ARGS]{"name": "ping", "arguments": {"x": 1}}',
        '[TOOL_CALLS]get_weather[ARGS]{"arguments": {"city": "Paris"}}',
        '[TOOL_CALLS]get_weather[ARGS]{"parameters": "Paris"}',
        '[TOOL_CALLS]write_file[ARGS]{"name": "a", "path": "b"}',
    ]
