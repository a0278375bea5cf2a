// What people do with the openai client of npm, done to a server. Prints what went well.
//
//     OPENAI_API_KEY=... node talk_openai.mjs PYHELP_URL SCRIPTED_URL

import assert from "node:assert/strict";
import OpenAI from "openai";

const [pyhelp, scripted] = process.argv
  .slice(2)
  .map((url) => new OpenAI({ baseURL: `${url}/v1`, maxRetries: 0 }));
const messages = [{ role: "user", content: "What does json.dumps do?" }];
const add = {
  type: "function",
  function: {
    name: "add",
    parameters: {
      type: "object",
      properties: { a: { type: "integer" }, b: { type: "integer" } },
      required: ["a", "b"],
    },
  },
};

const checks = {
  async lists_models() {
    const models = [];
    for await (const model of pyhelp.models.list()) models.push(model.id);
    assert.deepEqual(models, ["pyhelp"]);
    assert.equal((await pyhelp.models.retrieve("pyhelp")).id, "pyhelp");
    await assert.rejects(pyhelp.models.retrieve("org/other"), OpenAI.NotFoundError);
  },

  async completes() {
    const asked = { model: "pyhelp", prompt: "json.dumps", max_tokens: 8, temperature: 0 };
    const whole = await pyhelp.completions.create(asked);
    let streamed = "";
    for await (const chunk of await pyhelp.completions.create({ ...asked, stream: true })) {
      streamed += chunk.choices[0]?.text ?? "";
    }
    assert.equal(streamed, whole.choices[0].text);
  },

  async chats() {
    const asked = { model: "pyhelp", messages, max_completion_tokens: 24 };
    const whole = await pyhelp.chat.completions.create(asked);
    const stream = pyhelp.chat.completions.stream(asked);
    const streamed = await stream.finalContent();
    assert.equal(streamed, whole.choices[0].message.content);
  },

  async calls_tools() {
    const asked = { model: "scripted", messages, tools: [add], seed: 1 };
    const stream = scripted.chat.completions.stream(asked);
    const message = await stream.finalMessage();
    assert.equal(message.tool_calls[0].function.name, "add");
    assert.deepEqual(JSON.parse(message.tool_calls[0].function.arguments), { a: 1, b: 2 });
  },

  async embeds() {
    const found = await pyhelp.embeddings.create({ model: "pyhelp", input: "json" });
    assert.ok(found.data[0].embedding.length > 0);
  },

  async responds() {
    const asked = { model: "pyhelp", input: "What does json.dumps do?", max_output_tokens: 24 };
    const whole = await pyhelp.responses.create(asked);
    assert.ok(whole.output_text);
    const streamed = await pyhelp.responses.stream(asked).finalResponse();
    assert.equal(streamed.output_text, whole.output_text);
  },

  async is_told_what_is_wrong() {
    const asked = { model: "pyhelp", messages, temperature: 1000 };
    await assert.rejects(pyhelp.chat.completions.create(asked), OpenAI.BadRequestError);
  },

  async leaves_in_the_middle() {
    const asked = { model: "pyhelp", prompt: "json", max_tokens: 500, stream: true };
    const stream = await pyhelp.completions.create(asked);
    for await (const _ of stream) break;
    assert.ok(stream.controller.signal.aborted);
  },
};

for (const [name, check] of Object.entries(checks)) {
  await check();
  console.log(name);
}
