// Calls of the npm package `openai` for record.py: prints the package with its version, then a name for each request.
//
// usage: node record.mjs FOLDER BASE_URL DATA_URI, with the folder that has the package in its node_modules

import { createRequire } from "node:module";
import { join } from "node:path";

const [folder, baseURL, picture] = process.argv.slice(2);
const from = createRequire(join(folder, "package.json"));
const { default: OpenAI } = from("openai");
const client = new OpenAI({ baseURL, apiKey: "unused", maxRetries: 0 });
const question = "What is the weather in Paris?";
const image = { type: "image_url", image_url: { url: picture, detail: "auto" } };
const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"], additionalProperties: false };
const tool = { type: "function", function: { name: "weather", parameters, strict: true } };

async function record(name, call) {
  console.log(name);
  // The recorder answers streaming requests with an error.
  await call().catch((error) => {
    if (error.status !== 400) throw error;
  });
}

console.log(`openai (npm) ${from("openai/version").VERSION}`);
const chat = (fields) => client.chat.completions.create({ model: "m", messages: [{ role: "user", content: question }], ...fields });
await record("chat", () =>
  chat({ messages: [{ role: "user", content: [image, { type: "text", text: question }] }], user: "u", metadata: { a: "b" } }),
);
await record("chat-stream", () => chat({ stream: true, stream_options: { include_usage: true } }));
await record("chat-tools", () => chat({ tools: [tool], tool_choice: "auto", parallel_tool_calls: false }));
await record("responses", () => client.responses.create({ model: "m", input: question, prompt_cache_key: "k" }));
