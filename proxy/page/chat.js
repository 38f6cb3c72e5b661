// A chat with the model, and what is known of how each answer came about.
import { seconds } from "./charts.js";

const byId = (id) => document.getElementById(id);
const conversation = [];
let running = null;

function bubble(role, text) {
  const made = document.createElement("div");
  made.className = `message ${role}`;
  const content = document.createElement("span");
  content.className = "content";
  content.textContent = text;
  made.append(content);
  byId("messages").append(made);
  made.scrollIntoView({ block: "nearest" });
  return made;
}

function note(message, text) {
  const line = message.querySelector(".served") ?? document.createElement("span");
  line.className = "served";
  line.textContent = text;
  message.append(line);
}

// The data of server-sent events, one by one.
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (held + value).split("\n\n");
    held = parts.pop();
    for (const part of parts) if (part.startsWith("data: ")) yield part.slice(6);
  }
}

async function ask(model, message, signal) {
  const headers = { "content-type": "application/json" };
  const key = byId("api-key").value;
  if (key) headers.authorization = `Bearer ${key}`;
  const body = {
    model,
    messages: conversation,
    stream: true,
    max_tokens: Number(byId("max-tokens").value) || undefined,
    temperature: Number(byId("temperature").value),
  };
  const startedMs = performance.now();
  const answer = await fetch("/v1/chat/completions", { method: "POST", headers, body: JSON.stringify(body), signal });
  if (!answer.ok) throw new Error((await answer.json()).error.message);
  const content = message.querySelector(".content");
  let firstMs = null, numChunks = 0;
  for await (const data of events(answer.body)) {
    if (data === "[DONE]") break;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Error(chunk.error.message);
    if (firstMs === null) {
      firstMs = performance.now() - startedMs;
      message.classList.remove("waiting");
      note(message, `first token after ${seconds(firstMs / 1000)}`);
    }
    const delta = chunk.choices[0]?.delta ?? {};
    if (delta.content) { content.textContent += delta.content; numChunks += 1; }
  }
  return { requestId: answer.headers.get("x-request-id"), firstMs, numChunks };
}

async function tell(message, { requestId, firstMs }) {
  const trace = await (await fetch(`/page/requests/${requestId}`, { cache: "no-store" })).json();
  if (trace.state === "unknown") return;
  const served = `served by ${trace.engines.join(" → ")}`;
  const parts = [served, `first token after ${seconds(trace.first_token_s)} (${seconds(firstMs / 1000)} seen here)`];
  if (trace.kv_arrived_s !== null) parts.push(`KV arrived by ${seconds(trace.kv_arrived_s)}`);
  if (trace.ended_s !== null) parts.push(`complete after ${seconds(trace.ended_s)}`);
  if (trace.num_migrations) parts.push(`moved on ${trace.num_migrations} times`);
  note(message, parts.join(" · "));
}

async function send(model) {
  const question = byId("question").value.trim();
  if (!question || running) return;
  byId("question").value = "";
  conversation.push({ role: "user", content: question });
  bubble("user", question);
  const message = bubble("assistant", "");
  message.classList.add("waiting");
  running = new AbortController();
  setBusy(true);
  try {
    const how = await ask(model, message, running.signal);
    await tell(message, how);
  } catch (error) {
    message.classList.add("failed");
    note(message, error.name === "AbortError" ? "stopped" : error.message);
  } finally {
    message.classList.remove("waiting");
    const text = message.querySelector(".content").textContent;
    if (text) conversation.push({ role: "assistant", content: text });
    else conversation.pop();
    running = null;
    setBusy(false);
  }
}

function setBusy(isBusy) {
  byId("send").disabled = isBusy;
  byId("stop").disabled = !isBusy;
}

export function startChat(modelName) {
  byId("chat").addEventListener("submit", (event) => {
    event.preventDefault();
    send(modelName());
  });
  byId("question").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      byId("chat").requestSubmit();
    }
  });
  byId("stop").addEventListener("click", () => running?.abort());
}
