// A conversation that any program with the `openai` package could have, without a special case for Tandem.
// Run as: node conversation.mjs BASE_URL MODEL. Prints one JSON object with what came back.
import assert from "node:assert/strict";
import OpenAI from "openai";

const [baseURL, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "Name a colour." }];
const greedy = { model, temperature: 0, max_tokens: 12 };

const models = [];
for await (const each of client.models.list()) models.push(each.id);
assert.deepEqual(models, [model]);

const whole = await client.chat.completions.create({ ...greedy, messages, logprobs: true, top_logprobs: 2 });
assert.equal(whole.choices[0].message.role, "assistant");
assert.ok(whole.choices[0].logprobs.content.length > 0);

let streamed = "";
let usage = null;
const stream = await client.chat.completions.create({
  ...greedy, messages, stream: true, stream_options: { include_usage: true },
});
for await (const chunk of stream) {
  streamed += chunk.choices[0]?.delta?.content ?? "";
  usage = chunk.usage ?? usage;
}
assert.equal(streamed, whole.choices[0].message.content);
assert.deepEqual(usage.completion_tokens, whole.usage.completion_tokens);

const helped = await client.chat.completions.stream({ ...greedy, messages }).finalContent();
assert.equal(helped, streamed);

const tools = [{
  type: "function",
  function: {
    name: "get_weather",
    description: "The weather in a city",
    parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
  },
}];
const call = { id: "call_1", type: "function", function: { name: "get_weather", arguments: '{"city": "Bern"}' } };
const afterTool = await client.chat.completions.create({
  ...greedy,
  tools,
  messages: [
    { role: "user", content: "How is the weather in Bern?" },
    { role: "assistant", content: null, tool_calls: [call] },
    { role: "tool", tool_call_id: "call_1", content: "Sunny, 21 degrees." },
  ],
});
assert.ok(["stop", "length", "tool_calls"].includes(afterTool.choices[0].finish_reason));

const response = await client.responses.create({ model, input: "Name a colour.", temperature: 0, max_output_tokens: 12 });
assert.equal(response.output_text, streamed);
let events = 0;
let last = null;
const responseStream = await client.responses.create({
  model, input: "Name a colour.", temperature: 0, max_output_tokens: 12, stream: true,
});
for await (const event of responseStream) {
  assert.equal(event.sequence_number, events++);
  last = event;
}
assert.ok(["response.completed", "response.incomplete"].includes(last.type));
assert.equal(last.response.output[0].content[0].text, streamed);

await assert.rejects(client.chat.completions.create({ ...greedy, model: "nope", messages }), OpenAI.NotFoundError);
await assert.rejects(client.chat.completions.create({ ...greedy, n: 99, messages }), OpenAI.BadRequestError);

const left = await client.chat.completions.create({ ...greedy, max_tokens: 200, messages, stream: true });
for await (const chunk of left) { if (chunk.choices.length) break; }

console.log(JSON.stringify({ text: streamed, weather: afterTool.choices[0].message.content, events }));
