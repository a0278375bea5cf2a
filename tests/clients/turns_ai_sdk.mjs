// Conversations of three turns with the AI SDK of npm. Prints which went well.
//
//     OPENAI_API_KEY=... node turns_ai_sdk.mjs URL

import assert from "node:assert/strict";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const baseURL = `${process.argv[2]}/v1`;
const apiKey = process.env.OPENAI_API_KEY;
const compatible = createOpenAICompatible({ name: "aioserve", baseURL, apiKey });
const openai = createOpenAI({ baseURL, apiKey });
const add = tool({
  description: "Adds two numbers.",
  inputSchema: z.object({ a: z.number().int(), b: z.number().int() }),
  execute: async ({ a, b }) => String(a + b),
});

async function converse(model, ask, providerOptions) {
  const messages = [];
  for (let turn = 0; turn < 3; turn += 1) {
    messages.push({ role: "user", content: "What is 1 and 2?" });
    const done = await ask({
      model,
      messages,
      tools: { add },
      stopWhen: stepCountIs(3),
      maxRetries: 0,
      providerOptions,
    });
    assert.equal(await done.text, "It is 3.");
    messages.push(...(await done.responseMessages));
  }
}

const stream = async (asked) => {
  const done = streamText({ ...asked, onError: ({ error }) => assert.fail(error) });
  await done.consumeStream();
  return done;
};

const checks = {
  async compatible() {
    await converse(compatible("scripted"), generateText);
  },

  async compatible_streamed() {
    await converse(compatible("scripted"), stream);
  },

  async openai_chat() {
    await converse(openai.chat("scripted"), generateText);
    await converse(openai.chat("scripted"), stream);
  },

  async openai_responses() {
    const unstored = { openai: { store: false } };
    await converse(openai.responses("scripted"), generateText, unstored);
    await converse(openai.responses("scripted"), stream, unstored);
  },
};

for (const [name, check] of Object.entries(checks)) {
  await check();
  console.log(name);
}
