"""Records the requests of client packages for recorded.rs. Run by `cargo xtask record-clients`.

usage: record.py FOLDER [NODE SCRIPT PACKAGES]

Writes a file per call with the client's version, the path and the body. Skips packages that this
Python does not have. NODE is Node.js, SCRIPT is record.mjs, and PACKAGES is the folder with npm's
packages.
"""

import asyncio
import base64
import importlib.metadata
import importlib.util
import json
import os
import struct
import subprocess
import sys
import threading
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

OUTPUT_FOLDER = Path(sys.argv[1])
NODE_COMMAND = sys.argv[2:]
QUESTION = "What is the weather in Paris?"
os.environ.update(
    OPENAI_API_KEY="unused", OPENAI_AGENTS_DISABLE_TRACING="1", LITELLM_LOCAL_MODEL_COST_MAP="True"
)


def png(side=56):
    """Returns a small grey picture."""
    chunk = lambda kind, data: (
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    )
    rows = b"".join(b"\0" + b"\x80" * side for _ in range(side))
    head = struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", head)
        + chunk(b"IDAT", zlib.compress(rows, 9))
        + chunk(b"IEND", b"")
    )


PNG = base64.b64encode(png()).decode()
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + PNG}}
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "description": "The city."}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "Tells the weather.", "parameters": PARAMETERS},
}
USAGE = {"prompt_tokens": 9, "completion_tokens": 3, "total_tokens": 12}


def chat_answer(body):
    """Returns a chat answer as Chiasm would give it: a call of the first function, or text.

    The answer is text if there is no function or the last message is a call's result.
    """
    reasoning = {"refusal": None, "reasoning": "Hm.", "reasoning_content": "Hm."}
    message = {"role": "assistant", "content": "It is sunny.", **reasoning}
    functions = [tool["function"]["name"] for tool in body.get("tools") or []]
    if functions and body["messages"][-1]["role"] != "tool":
        call = {"id": "call_1", "type": "function"}
        call["function"] = {"name": functions[0], "arguments": '{"city": "Paris"}'}
        message = {"role": "assistant", "content": None, **reasoning, "tool_calls": [call]}
    elif body.get("response_format"):
        message["content"] = '{"city": "Paris"}'
    choice = {"index": 0, "message": message, "logprobs": None, "stop_reason": None}
    choice["finish_reason"] = "tool_calls" if "tool_calls" in message else "stop"
    return {
        "id": "c",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "choices": [choice],
        "usage": USAGE,
    }


def response_answer(body):
    """Returns a Responses answer as Chiasm would give it: reasoning, and a call or text."""
    text = {"type": "output_text", "text": "It is sunny.", "annotations": []}
    item = {
        "type": "message",
        "id": "msg_1",
        "role": "assistant",
        "status": "completed",
        "content": [text],
    }
    reasoning = [{"type": "reasoning_text", "text": "Hm."}]
    reasoning = {
        "type": "reasoning",
        "id": "rs_1",
        "summary": [],
        "content": reasoning,
        "status": "completed",
    }
    answered = any(
        item.get("type") == "function_call_output"
        for item in body["input"]
        if isinstance(item, dict)
    )
    if body.get("tools") and not answered:
        item = {
            "type": "function_call",
            "id": "fc_1",
            "call_id": "call_1",
            "name": body["tools"][0]["name"],
        }
        item.update(arguments='{"city": "Paris"}', status="completed")
    usage = {"input_tokens": 9, "output_tokens": 3, "total_tokens": 12}
    usage.update(
        input_tokens_details={"cached_tokens": 0}, output_tokens_details={"reasoning_tokens": 0}
    )
    answer = {
        "id": "resp_1",
        "object": "response",
        "created_at": 1,
        "status": "completed",
        "output": [reasoning, item],
    }
    return {
        **answer,
        "model": "m",
        "tools": [],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "usage": usage,
    }


def message_answer(body):
    """Returns a Messages answer as Chiasm would give it: text."""
    answer = {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "m",
        "stop_reason": "end_turn",
    }
    usage = {"input_tokens": 9, "output_tokens": 3}
    return {
        **answer,
        "content": [{"type": "text", "text": "It is sunny."}],
        "stop_sequence": None,
        "usage": usage,
    }


ANSWERS = {
    "/v1/chat/completions": chat_answer,
    "/v1/responses": response_answer,
    "/v1/messages": message_answer,
}


class Recorder(BaseHTTPRequestHandler):
    """Stores posted bodies. Streaming requests get an error, because only their body matters."""

    protocol_version = "HTTP/1.1"
    posted = []

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        path = self.path.split("?")[0]
        self.posted.append({"path": path, "body": body})
        if body.get("stream") or path not in ANSWERS:
            self.answer(
                400,
                {
                    "error": {
                        "message": "recorded",
                        "type": "invalid_request_error",
                        "param": None,
                        "code": None,
                    }
                },
            )
        else:
            self.answer(200, ANSWERS[path](body))

    def answer(self, status, body):
        body = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


server = ThreadingHTTPServer(("127.0.0.1", 0), Recorder)
threading.Thread(target=server.serve_forever, daemon=True).start()
ROOT = f"http://127.0.0.1:{server.server_port}"
BASE = ROOT + "/v1"


def record(package, name, call):
    """Runs a call and writes its requests: NAME.json, and NAME-2.json for a second request."""
    Recorder.posted = posted = []
    failure = None
    try:
        call()
    except Exception as error:
        failure = error
    if not posted:
        raise RuntimeError(f"{name} posted nothing") from failure
    print(
        f"{name}: {len(posted)}" + (f" ({type(failure).__name__})" if failure else ""), flush=True
    )
    client = f"{package} {importlib.metadata.version(package)}"
    for number, recorded in enumerate(posted, 1):
        write(name if number == 1 else f"{name}-{number}", {"client": client, **recorded})


def write(name, recorded):
    OUTPUT_FOLDER.mkdir(parents=True, exist_ok=True)
    (OUTPUT_FOLDER / f"{name}.json").write_text(
        json.dumps(recorded, indent=1, ensure_ascii=False) + "\n"
    )


def messages(*parts):
    return [
        {
            "role": "user",
            "content": [*parts, {"type": "text", "text": QUESTION}] if parts else QUESTION,
        }
    ]


def record_openai():
    import openai

    # Two versions are in use: vLLM's, and the one that other packages require.
    client = openai.OpenAI(base_url=BASE, max_retries=0)
    name = "openai-" + openai.__version__.split(".")[0]
    chat = client.chat.completions.create
    save = lambda kind, call: record("openai", f"{name}-{kind}", call)
    all_fields = {
        "user": "u",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "safety_identifier": "s",
    }
    all_fields.update(
        prompt_cache_key="k",
        verbosity="medium",
        modalities=["text"],
        n=1,
        seed=1,
        top_p=0.9,
        stop=["x"],
    )
    all_fields.update(
        prediction={"type": "content", "content": "It is"},
        reasoning_effort="low",
        parallel_tool_calls=False,
    )
    all_fields.update(
        prompt_cache_retention="24h",
        presence_penalty=0,
        frequency_penalty=0,
        logit_bias={},
        logprobs=False,
    )
    if name == "openai-3":
        all_fields.update(prompt_cache_options={"mode": "implicit"}, function_call="none")
    save("chat", lambda: chat(model="m", messages=messages(IMAGE), **all_fields))
    stream = {
        "stream": True,
        "stream_options": {"include_usage": True, "include_obfuscation": False},
    }
    save("chat-stream", lambda: chat(model="m", messages=messages(), **stream))
    tools = {"tools": [TOOL], "tool_choice": "auto"}

    def loop():
        history = messages()
        reply = chat(model="m", messages=history, **tools).choices[0].message
        history += [
            reply,
            {"role": "tool", "tool_call_id": reply.tool_calls[0].id, "content": "sunny"},
        ]
        reply = chat(model="m", messages=history, **tools).choices[0].message
        # Some clients send back all fields of earlier messages.
        history += [reply.model_dump(), *messages()]
        chat(model="m", messages=history, **tools)

    save("chat-tools", loop)
    if name == "openai-2":
        from pydantic import BaseModel

        class Place(BaseModel):
            city: str

        parse = lambda: client.chat.completions.parse(
            model="m", messages=messages(), response_format=Place
        )
        save("chat-parse", parse)
    save(
        "completion",
        lambda: client.completions.create(model="m", prompt="the quick", user="u", suffix=None),
    )
    respond = client.responses.create
    image = {"type": "input_image", "image_url": IMAGE["image_url"]["url"], "detail": "auto"}
    request = [{"role": "user", "content": [image, {"type": "input_text", "text": QUESTION}]}]
    fields = {
        "user": "u",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "prompt_cache_key": "k",
    }
    save("responses", lambda: respond(model="m", input=request, truncation="disabled", **fields))
    flat = {"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": True}
    save("responses-tools", lambda: respond(model="m", input=QUESTION, tools=[flat], stream=True))


def record_anthropic():
    import anthropic

    client = anthropic.Anthropic(base_url=ROOT, api_key="unused", max_retries=0)
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}}
    history = [
        {
            "role": "user",
            "content": [
                image,
                {"type": "text", "text": QUESTION, "cache_control": {"type": "ephemeral"}},
            ],
        }
    ]
    save = lambda kind, call: record("anthropic", f"anthropic-{kind}", call)
    more = {"metadata": {"user_id": "u"}, "service_tier": "auto", "speed": "standard"}
    more["system"] = [{"type": "text", "text": "Be brief."}]
    save(
        "messages",
        lambda: client.messages.create(
            model="m", max_tokens=16, messages=history, stop_sequences=["x"], **more
        ),
    )
    tool = {"name": "weather", "description": "Tells the weather.", "input_schema": PARAMETERS}
    history = [
        *messages(),
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "t", "name": "weather", "input": {}}],
        },
    ]
    history += [
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "t", "content": "sunny"}],
        }
    ]
    save(
        "tools",
        lambda: client.messages.create(
            model="m", max_tokens=16, messages=history, tools=[tool], stream=True
        ),
    )
    save("count", lambda: client.messages.count_tokens(model="m", messages=history, tools=[tool]))


def record_langchain():
    from langchain_core.messages import HumanMessage
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI, OpenAI
    from pydantic import BaseModel

    @tool
    def weather(city: str) -> str:
        """Tells the weather."""
        return "sunny"

    class Place(BaseModel):
        """A place."""

        city: str

    chat = ChatOpenAI(model="m", base_url=BASE, api_key="unused", max_retries=0)
    save = lambda kind, call: record("langchain-openai", f"langchain-{kind}", call)
    save("chat", lambda: chat.invoke([HumanMessage(content=messages(IMAGE)[0]["content"])]))
    save("chat-stream", lambda: list(chat.bind(stream_usage=True).stream(QUESTION)))
    block = {"type": "image", "base64": PNG, "mime_type": "image/png"}
    save(
        "chat-block",
        lambda: chat.invoke([HumanMessage(content=[block, {"type": "text", "text": QUESTION}])]),
    )

    def agent():
        history = [HumanMessage(content=QUESTION)]
        bound = chat.bind_tools([weather])
        reply = bound.invoke(history)
        bound.invoke([*history, reply, *(weather.invoke(call) for call in reply.tool_calls)])

    save("tools", agent)
    save(
        "tools-any",
        lambda: chat.bind_tools([weather], tool_choice="any", parallel_tool_calls=False).invoke(
            QUESTION
        ),
    )
    for method in ("json_schema", "function_calling", "json_mode"):
        structured = chat.with_structured_output(Place, method=method)
        save(
            f"structured-{method.replace('_', '-')}",
            lambda: structured.invoke("A place as JSON, please."),
        )
    save(
        "completion",
        lambda: OpenAI(model="m", base_url=BASE, api_key="unused", max_retries=0).invoke(
            "the quick"
        ),
    )
    responses = ChatOpenAI(
        model="m", base_url=BASE, api_key="unused", max_retries=0, use_responses_api=True
    )
    save(
        "responses", lambda: responses.invoke([HumanMessage(content=messages(IMAGE)[0]["content"])])
    )


def record_litellm():
    import litellm

    save = lambda kind, call: record("litellm", f"litellm-{kind}", call)
    complete = lambda **more: litellm.completion(
        **{
            "model": "openai/m",
            "api_base": BASE,
            "api_key": "unused",
            "messages": messages(),
            "max_retries": 0,
            **more,
        }
    )
    save(
        "chat",
        lambda: complete(messages=messages(IMAGE), user="u", metadata={"a": "b"}, max_tokens=16),
    )
    save("chat-stream", lambda: list(complete(stream=True, stream_options={"include_usage": True})))

    def loop():
        reply = complete(tools=[TOOL]).choices[0].message
        complete(
            messages=[
                *messages(),
                reply,
                {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
            ],
            tools=[TOOL],
        )

    save("tools", loop)
    cached = {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}
    system = {"role": "system", "content": [cached]}
    save("cached", lambda: complete(messages=[system, *messages()]))
    save(
        "hosted-vllm",
        lambda: complete(model="hosted_vllm/m", messages=messages(IMAGE), tools=[TOOL]),
    )
    claude = {"model": "anthropic/m", "api_base": ROOT}
    save("anthropic", lambda: complete(**claude, messages=messages(IMAGE)))
    save("anthropic-tools", lambda: complete(**claude, tools=[TOOL], stream=True))
    save(
        "responses",
        lambda: litellm.responses(
            model="openai/m", api_base=BASE, api_key="unused", input=QUESTION
        ),
    )


def record_llama_index():
    from llama_index.core.llms import ChatMessage, ImageBlock, TextBlock
    from llama_index.core.tools import FunctionTool
    from llama_index.llms.openai import OpenAI

    # LlamaIndex looks up a model's context length by its name.
    llm = OpenAI(model="gpt-4o", api_base=BASE, api_key="unused", max_retries=0)
    save = lambda kind, call: record("llama-index-llms-openai", f"llama-index-{kind}", call)
    blocks = [ImageBlock(image=png(), image_mimetype="image/png"), TextBlock(text=QUESTION)]
    save("chat", lambda: llm.chat([ChatMessage(role="user", blocks=blocks)]))
    save("chat-stream", lambda: list(llm.stream_chat([ChatMessage(role="user", content=QUESTION)])))

    def weather(city: str) -> str:
        """Tells the weather."""
        return "sunny"

    save(
        "tools",
        lambda: llm.predict_and_call([FunctionTool.from_defaults(weather)], user_msg=QUESTION),
    )


def record_instructor():
    import instructor
    import openai
    from pydantic import BaseModel

    class Place(BaseModel):
        city: str

    save = lambda kind, call: record("instructor", f"instructor-{kind}", call)
    for mode in ("TOOLS", "JSON", "JSON_SCHEMA"):
        client = instructor.from_openai(
            openai.OpenAI(base_url=BASE, max_retries=0), mode=instructor.Mode[mode]
        )
        complete = lambda: client.chat.completions.create(
            model="m", messages=messages(), response_model=Place, max_retries=0
        )
        save(mode.lower().replace("_", "-"), complete)


def record_pydantic_ai():
    from pydantic import BaseModel
    from pydantic_ai import Agent, BinaryContent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    class Place(BaseModel):
        city: str

    model = OpenAIChatModel("m", provider=OpenAIProvider(base_url=BASE, api_key="unused"))
    save = lambda kind, call: record("pydantic-ai-slim", f"pydantic-ai-{kind}", call)
    picture = BinaryContent(data=png(), media_type="image/png")
    save("chat", lambda: Agent(model, system_prompt="Be brief.").run_sync([QUESTION, picture]))
    save("output", lambda: Agent(model, output_type=Place).run_sync(QUESTION))
    agent = Agent(model)

    @agent.tool_plain
    def weather(city: str) -> str:
        """Tells the weather."""
        return "sunny"

    save("tools", lambda: agent.run_sync(QUESTION))


def record_agents():
    import agents
    import openai

    agents.set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=BASE, max_retries=0)

    @agents.function_tool
    def weather(city: str) -> str:
        """Tells the weather."""
        return "sunny"

    kinds = {"chat": agents.OpenAIChatCompletionsModel, "responses": agents.OpenAIResponsesModel}
    for kind, model in kinds.items():
        agent = agents.Agent(
            name="a",
            instructions="Be brief.",
            tools=[weather],
            model=model(model="m", openai_client=client),
        )
        record(
            "openai-agents",
            f"openai-agents-{kind}",
            lambda: agents.Runner.run_sync(agent, QUESTION),
        )


def record_vllm_bench():
    import aiohttp
    from vllm.benchmarks.lib.endpoint_request_func import ASYNC_REQUEST_FUNCS, RequestFuncInput

    def bench_call(backend, path, **more):
        async def complete():
            request = {"prompt_len": 4, "output_len": 8, "model": "m", "ignore_eos": True, **more}
            request.setdefault("prompt", QUESTION)
            async with aiohttp.ClientSession() as session:
                await ASYNC_REQUEST_FUNCS[backend](
                    RequestFuncInput(api_url=BASE + path, **request), session
                )

        return lambda: asyncio.run(complete())

    sampled = {"extra_body": {"temperature": 0.0}}
    record("vllm", "vllm-bench-completions", bench_call("openai", "/completions", **sampled))
    record(
        "vllm",
        "vllm-bench-chat",
        bench_call("openai-chat", "/chat/completions", multi_modal_content=IMAGE, **sampled),
    )


CLIENTS = {
    "openai": record_openai,
    "anthropic": record_anthropic,
    "langchain_openai": record_langchain,
    "litellm": record_litellm,
    "llama_index": record_llama_index,
    "instructor": record_instructor,
    "pydantic_ai": record_pydantic_ai,
    "agents": record_agents,
    "vllm": record_vllm_bench,
}
for package, calls in CLIENTS.items():
    if importlib.util.find_spec(package) is not None:
        calls()
    else:
        print(f"{package} is not installed")
if NODE_COMMAND:
    Recorder.posted = posted = []
    output = subprocess.run(
        [*NODE_COMMAND, BASE, "data:image/png;base64," + PNG],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    client, *names = output.splitlines()
    assert len(names) == len(posted), (names, posted)
    for name, recorded in zip(names, posted):
        write(f"openai-npm-{name}", {"client": client, **recorded})
# Some packages leave threads running.
sys.stdout.flush()
os._exit(0)
