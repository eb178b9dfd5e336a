// OpenAI's client for Node against a server: prints what it was told, as JSON.
//
// node openai_node.mjs URL KEY LIMITED_URL

import OpenAI from "openai";

const [URL, KEY, LIMITED_URL] = process.argv.slice(2);
const MODEL = "tiny";
const CHAT = [{ role: "user", content: "Tell me" }];
const SCHEMA = {
  type: "object",
  properties: { city: { type: "string", enum: ["Oslo", "Rome"] } },
  required: ["city"],
  additionalProperties: false,
};
const TOOL = {
  type: "function",
  function: { name: "clock", description: "The time somewhere", parameters: SCHEMA },
};

const at = (url, apiKey) => new OpenAI({ baseURL: `${url}/v1`, apiKey, maxRetries: 0 });
const client = at(URL, KEY);

function ask(more) {
  const asked = { model: MODEL, messages: CHAT, max_tokens: 24, temperature: 0, ...more };
  return client.chat.completions.create(asked);
}

async function whole() {
  const { choices, usage } = await ask();
  const [{ message, finish_reason }] = choices;
  return { text: message.content, finish_reason, completion_tokens: usage.completion_tokens };
}

async function streamed() {
  const told = { text: "", finish_reason: null, completion_tokens: null };
  for await (const chunk of await ask({ stream: true, stream_options: { include_usage: true } })) {
    for (const { delta, finish_reason } of chunk.choices) {
      told.text += delta.content ?? "";
      told.finish_reason = finish_reason ?? told.finish_reason;
    }
    told.completion_tokens = chunk.usage?.completion_tokens ?? null;
  }
  return told;
}

async function tool(stream) {
  const asked = {
    model: MODEL,
    messages: CHAT,
    max_tokens: 600,
    seed: 1,
    tools: [TOOL],
    tool_choice: "required",
    parallel_tool_calls: false,
  };
  const got = stream
    ? await client.chat.completions.stream(asked).finalChatCompletion()
    : await client.chat.completions.create(asked);
  const [{ message, finish_reason }] = got.choices;
  const [call] = message.tool_calls;
  return { finish_reason, name: call.function.name, arguments: call.function.arguments };
}

async function form() {
  const json_schema = { name: "answer", strict: true, schema: SCHEMA };
  const response_format = { type: "json_schema", json_schema };
  const got = await ask({ max_tokens: 300, temperature: 1, seed: 1, response_format });
  return got.choices[0].message.content;
}

async function logprobs() {
  const got = await ask({ max_tokens: 5, logprobs: true, top_logprobs: 2 });
  return got.choices[0].logprobs.content.map(({ token, logprob, top_logprobs }) => ({
    token,
    logprob,
    top: top_logprobs.map((one) => one.logprob),
  }));
}

async function several() {
  const got = await ask({ n: 3, temperature: 1, seed: 5 });
  return got.choices.map(({ message }) => message.content);
}

async function error(call) {
  try {
    await call();
  } catch (caught) {
    const { status, message, param, code } = caught;
    return { class: caught.constructor.name, status, message, param, code };
  }
  return null;
}

const complete = (other) => () =>
  other.completions.create({ model: MODEL, prompt: "x", max_tokens: 1 });
const limited = complete(at(LIMITED_URL, KEY));
await limited();
const say = (content) => [{ role: "user", content }];
console.log(
  JSON.stringify({
    whole: await whole(),
    streamed: await streamed(),
    tool: await tool(false),
    "streamed tool": await tool(true),
    form: await form(),
    logprobs: await logprobs(),
    several: await several(),
    errors: {
      "bad value": await error(() => ask({ top_p: 7 })),
      "wrong type": await error(() => ask({ seed: "x" })),
      "wrong key": await error(complete(at(URL, "not the key"))),
      "no such model": await error(() => ask({ model: "other" })),
      "no such path": await error(() => client.embeddings.create({ model: MODEL, input: "x" })),
      "too big": await error(() => ask({ messages: say("x".repeat(100_000)) })),
      "too long": await error(() => ask({ messages: say("x".repeat(3000)) })),
      "too many": await error(limited),
      streamed: await error(() => ask({ stream: true, top_p: 7 })),
    },
  }),
);
