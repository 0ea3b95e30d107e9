"""The cases of all reasoning parsers, and prompts that already open or close reasoning."""

from cases import PARIS, WEATHER

TEMPLATES = [
    {"enable_thinking": False},
    {"thinking": False},
    {"enable_thinking": True},
    {"thinking": True, "enable_thinking": False},
    {"reasoning_effort": "none"},
]


def text_cases(start, end):
    """Yields (name, text) of answers without calls."""
    thought = "Let me think."
    tag = start.rstrip("\n")
    yield "closed", f"{start}{thought}{end}Hello."
    yield "closed-lines", f"{start}\n{thought}\n{end}\n\nHello."
    yield "closed-white", f" {start} \n {thought} \n {end} \n Hello. \n "
    yield "closed-nothing-after", f"{start}{thought}{end}"
    yield "closed-white-after", f"{start}{thought}{end}\n\n"
    yield "no-start", f"{thought}\n{end}\n\nHello."
    yield "no-tag", "Hello, world."
    yield "no-tag-white", "\n\n Hello.\n"
    yield "unclosed", f"{start}\n{thought} And"
    yield "unclosed-white", f"{start}\n{thought}\n \n"
    yield "cut-end", f"{start}{thought}{end[:-1]}"
    yield "cut-end-short", f"{start}{thought}{end[:1]}"
    yield "cut-start", start[: len(tag) - 1]
    yield "start-alone", start
    yield "end-alone", end
    yield "end-first", f"{end}Hello."
    yield "end-first-lines", f"{end}\n\nHello."
    yield "empty", ""
    yield "white", "\n"
    yield "empty-block", f"{start}{end}Hello."
    yield "white-block", f"{start}\n\n{end}\n\nHello."
    yield "nothing-but-block", f"{start}\n\n{end}"
    yield "text-before", f"Hm. {start}{thought}{end}Hello."
    yield "two-blocks", f"{start}one{end}Hello.{start}two{end}World."
    yield "two-blocks-apart", f"{start}one{end}\n{start}two{end}\nWorld."
    yield "start-twice", f"{start}{start}{thought}{end}Hello."
    yield "start-inside", f"{start}one {tag} two{end}Hello."
    yield "end-twice", f"{start}{thought}{end}{end}Hello."
    yield "end-later", f"{start}one{end}Hello {end} there."
    yield "start-later", f"{start}one{end}Hello {tag} there."
    yield "no-start-end-later", f"one{end}Hello {end} there."
    yield "tag-like", f"{start}a < b, <thinking>, </thin> and <b>bold</b>{end}<think/> Hello."
    yield "tag-in-code", f"{start}one{end}Write `{tag}` and `{end}`."
    yield "other-tags", "<thought>hm</thought>[THINK]hm[/THINK]<think>hm</think>Hello."
    yield "unicode", f"{start}想一想 😀{end}é"
    yield "upper-case", f"{start.upper()}{thought}{end.upper()}Hello."


def call_cases(format, start, end):
    """Yields (name, text) of answers with calls, for a reasoning parser before a tool parser."""
    one = format.calls(WEATHER)
    two = format.calls(WEATHER, PARIS)
    yield "call", one
    yield "think-call", f"{start}\nLet me think.\n{end}\n\n{one}"
    yield "think-calls", f"{start}Let me think.{end}{two}"
    yield "think-text-call", f"{start}\nLet me think.\n{end}\n\nI look.\n{one}"
    yield "think-call-text", f"{start}Let me think.{end}{one}\nDone."
    yield "no-start-call", f"Let me think.\n{end}\n\n{one}"
    yield "call-in-unclosed", f"{start}\nLet me think.\n{one}"
    yield "call-in-unclosed-text-after", f"{start}Let me think.{one}Done."
    yield "call-in-unclosed-no-start", f"Let me think.\n{one}"
    yield "call-in-closed", f"{start}I could say {one} so.{end}Hello."
    yield "call-in-closed-then-call", f"{start}I could say {one} so.{end}{format.calls(PARIS)}"
    yield "call-then-end", f"{start}Let me think.{one}{end}Hello."
    yield "call-then-think", f"{one}{start}Let me think.{end}Hello."
    yield "empty-think-call", f"{start}\n\n{end}\n\n{one}"
    yield "cut-call", f"{start}Let me think.{end}{one[: one.index('Hangz') + 3]}"
    yield "cut-call-in-unclosed", f"{start}Let me think.{one[: one.index('Hangz') + 3]}"
    yield (
        "think-in-string",
        format.calls(("write_file", {"path": "a", "content": f"x {start}y{end} z"})),
    )
    yield (
        "think-then-think-in-string",
        f"{start}a{end}" + format.calls(("write_file", {"path": "a", "content": f"x {end} z"})),
    )
    yield "two-thinks-two-calls", f"{start}a{end}{one}{start}b{end}{format.calls(PARIS)}"
    yield "marker-in-think", f"{start}I write {format.markers[0]} here.{end}Hello."
    yield "end-marker-in-think", f"{start}I write {format.markers[-1]} here.{end}{one}"


# The cases that are repeated with other arguments of the template.
TEMPLATE_CASES = (
    "closed",
    "no-start",
    "no-tag",
    "unclosed",
    "think-call",
    "call",
    "call-in-unclosed",
)


def prompts(tokenizer, start, end):
    """Yields (name, end of the prompt) for the texts that a template may end with."""
    turn = {
        "qwen3": "<|im_start|>assistant\n",
        "glm45": "<|assistant|>\n",
        "gemma4": "<|turn>model\n",
    }.get(tokenizer, "Hello.\n")
    yield "open", f"{turn}{start}"
    yield "closed", f"{turn}{start}\n\n{end}\n\n"
    yield "closed-in-earlier-turn", f"{turn}{start}hm{end}Hello.\n{turn}"
    yield "nothing", turn


# The cases that are repeated with these prompts.
PROMPT_CASES = ("no-start", "no-tag", "call", "think-call")
