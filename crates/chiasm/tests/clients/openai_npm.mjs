// Tests the npm package `openai` with simulated engines: whole, streamed, with an image, and with tools.
//
// usage: node openai_npm.mjs FOLDER SEES CALLS PICTURE, with the folder that has the package in its node_modules, and servers whose
// engines describe the request, and call a function

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { join } from "node:path";

const [folder, sees, calls, picture] = process.argv.slice(2);
const { default: OpenAI } = createRequire(join(folder, "package.json"))("openai");
const client = (baseURL) => new OpenAI({ baseURL, apiKey: "unused", maxRetries: 0, timeout: 60_000 });
const ask = (baseURL, fields) => client(baseURL).chat.completions.create({ model: "m", ...fields });
const question = [{ role: "user", content: "What is the weather in Paris?" }];

// Checks that the engine's description of the image and the prompt agrees with the usage.
function checkSeen(text, usage, items) {
  const [, cached, prompt] = text.match(new RegExp(`^${items}; (\\d+) of (\\d+) prompt tokens were cached$`));
  assert.equal(usage.prompt_tokens, Number(prompt));
  assert.equal(usage.prompt_tokens_details.cached_tokens, Number(cached));
  assert.equal(usage.total_tokens, usage.prompt_tokens + usage.completion_tokens);
}

const url = `data:image/jpeg;base64,${readFileSync(picture).toString("base64")}`;
const content = [
  { type: "image_url", image_url: { url, detail: "low" } },
  { type: "text", text: "What is in this picture?" },
];
const seen = await ask(sees, { messages: [{ role: "user", content }] });
checkSeen(seen.choices[0].message.content, seen.usage, "1 image 280x224 \\(80 tokens, \\w+\\)");
assert.equal(seen.choices[0].finish_reason, "stop");

let [text, usage, finish, chunks] = ["", null, null, 0];
for await (const chunk of await ask(sees, { messages: question, stream: true, stream_options: { include_usage: true } })) {
  text += chunk.choices[0]?.delta.content ?? "";
  finish = chunk.choices[0]?.finish_reason ?? finish;
  usage = chunk.usage ?? usage;
  chunks += 1;
}
checkSeen(text, usage, "no images");
assert.equal(finish, "stop");
assert(chunks > 5, `${chunks} chunks`);

const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"], additionalProperties: false };
const tools = [{ type: "function", function: { name: "weather", parameters, strict: true } }];
for (const tool_choice of ["auto", "required"]) {
  const said = await ask(calls, { messages: question, tools, tool_choice });
  const [call, ...others] = said.choices[0].message.tool_calls;
  assert.deepEqual([call.function.name, JSON.parse(call.function.arguments), others], ["weather", { city: "Paris" }, []]);
  assert.equal(said.choices[0].finish_reason, "tool_calls");
  const result = { role: "tool", tool_call_id: call.id, content: "sunny" };
  const again = await ask(calls, { messages: [...question, said.choices[0].message, result], tools });
  assert(again.usage.prompt_tokens > said.usage.prompt_tokens);
}
// The package's own tool loop reads streams and answers calls by itself. It is ended here, as the model would call forever.
const asked = [];
const weather = ({ city }) => (asked.push(city), "sunny");
const runner = client(calls).chat.completions.runTools(
  {
    model: "m",
    stream: true,
    messages: question,
    tools: [{ type: "function", function: { function: weather, parse: JSON.parse, name: "weather", parameters } }],
  },
  { maxChatCompletions: 2 },
);
await runner.done();
assert.deepEqual(asked, ["Paris", "Paris"]);

const response = await client(sees).responses.create({ model: "m", input: "What is the weather in Paris?" });
assert.match(response.output_text, /^no images; \d+ of \d+ prompt tokens were cached$/);
console.log("ok");
