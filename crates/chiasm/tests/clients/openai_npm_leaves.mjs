// Cancels requests of the npm package `openai`: a stream halfway by its controller, and by timeouts a stream without tokens and a
// whole answer.
//
// usage: node openai_npm_leaves.mjs FOLDER BASE_URL, with the folder that has the package in its node_modules, and a server whose
// answers take minutes

import assert from "node:assert/strict";
import { createRequire } from "node:module";
import { join } from "node:path";

const [folder, baseURL] = process.argv.slice(2);
const { default: OpenAI, APIConnectionTimeoutError } = createRequire(join(folder, "package.json"))("openai");
const client = new OpenAI({ baseURL, apiKey: "unused", maxRetries: 0 });
// The engine needs some seconds for this prompt.
const [short, long] = [1, 500].map((times) => [{ role: "user", content: "c d ".repeat(times) }]);
const endless = { model: "m", max_tokens: 6000, ignore_eos: true };

const stream = await client.chat.completions.create({ messages: short, stream: true, ...endless });
let pieces = 0;
for await (const chunk of stream) {
  pieces += chunk.choices[0].delta.content ? 1 : 0;
  if (pieces === 3) stream.controller.abort();
}
assert(pieces >= 3 && pieces < 100, `${pieces} pieces`);

for (const [messages, stream] of [
  [long, true],
  [short, false],
]) {
  const began = performance.now();
  const asked = client.chat.completions.create({ messages, stream, ...endless }, { timeout: 1000 });
  await assert.rejects(asked, APIConnectionTimeoutError);
  assert(performance.now() - began < 5000);
}
console.log("ok");
