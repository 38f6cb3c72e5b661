// Asks the proxy how it is and draws the answer.
import { Chart, rate, seconds } from "./charts.js";
import { startChat } from "./chat.js";

const REFRESH_MS = 1000;
const LATENCIES = (kind) => [
  { key: `${kind}_p50_s`, name: "median", colour: "--first" },
  { key: `${kind}_p95_s`, name: "95th percentile", colour: "--second" },
];

const byId = (id) => document.getElementById(id);
const charts = [
  new Chart(byId("ttft-chart"), LATENCIES("ttft"), seconds),
  new Chart(byId("itl-chart"), LATENCIES("itl"), seconds),
  new Chart(byId("tokens-chart"), [{ key: "tokens_per_s", name: "all streams", colour: "--first" }], rate),
];
let status = null;

function node(tag, className, text) {
  const made = document.createElement(tag);
  made.className = className;
  made.textContent = text;
  return made;
}

function counted(number, word) {
  return `${number} ${word}${number === 1 ? "" : "s"}`;
}

function stateOf(engine) {
  if (engine.is_ready) return node("span", "state ready", "● ready");
  if (engine.problem === "draining") return node("span", "state leaving", "◐ draining");
  return node("span", "state down", "○ down");
}

function engineCard(engine) {
  const card = node("div", "engine", "");
  card.dataset.engine = engine.name;
  const state = stateOf(engine);
  card.append(state, node("div", "name", engine.name));
  if (engine.num_blocks !== null) {
    const used = engine.num_blocks - engine.num_free_blocks;
    const share = engine.num_blocks ? used / engine.num_blocks : 0;
    const bar = node("div", "bar", "");
    const fill = node("div", "", "");
    fill.style.width = `${(share * 100).toFixed(1)}%`;
    bar.append(fill);
    card.append(bar, node("div", "detail", `KV ${(share * 100).toFixed(0)} % of ${engine.num_blocks} blocks`));
  }
  const what = engine.role === "prompt" ? "prompt" : "stream";
  card.append(node("div", "detail", `${counted(engine.num_prompts, what)}, ${counted(engine.num_queued_tokens, "token")} under way`));
  if (engine.problem && engine.problem !== "draining") card.append(node("div", "detail", engine.problem));
  return card;
}

function drawEngines() {
  for (const role of ["prompt", "completion", "normal"]) {
    const cards = status.engines.filter((engine) => engine.role === role).map(engineCard);
    byId(`${role}-engines`).replaceChildren(...cards);
  }
  byId("topology-hint").textContent = status.engines.length ? "" : "No engines are configured.";
  drawLinks();
}

function drawLinks() {
  const svg = byId("links");
  svg.replaceChildren();
  const cards = (id) => [...byId(id).children];
  for (const from of cards("prompt-engines")) {
    for (const to of cards("completion-engines")) {
      // Within #topology, so that it does not matter how far the page is scrolled.
      const start = [from.offsetLeft + from.offsetWidth, from.offsetTop + from.offsetHeight / 2];
      const end = [to.offsetLeft, to.offsetTop + to.offsetHeight / 2];
      const middle = (start[0] + end[0]) / 2;
      const path = document.createElementNS(svg.namespaceURI, "path");
      path.setAttribute("d", `M${start} C${middle} ${start[1]} ${middle} ${end[1]} ${end}`);
      const moving = status.handovers.find((each) => each.from === from.dataset.engine && each.to === to.dataset.engine);
      svg.append(path);
      if (moving) {
        path.classList.add("moving");
        const label = document.createElementNS(svg.namespaceURI, "text");
        label.setAttribute("x", middle);
        label.setAttribute("y", (start[1] + end[1]) / 2 - 6);
        label.textContent = moving.count;
        svg.append(label);
      }
    }
  }
}

function drawFigures() {
  const last = [...status.history].reverse();
  const newest = (key) => last.find((bucket) => bucket[key] !== null)?.[key] ?? null;
  byId("open-requests").textContent = status.num_open_requests;
  byId("moving").textContent = status.handovers.reduce((sum, each) => sum + each.count, 0);
  byId("ttft-now").textContent = seconds(newest("ttft_p50_s"));
  byId("itl-now").textContent = seconds(newest("itl_p50_s"));
  byId("tokens-now").textContent = rate(last[0]?.tokens_per_s ?? null);
}

async function refresh() {
  const connection = byId("connection");
  try {
    const answer = await fetch("/page/status", { cache: "no-store" });
    if (!answer.ok) throw new Error(`status ${answer.status}`);
    status = await answer.json();
    byId("model").textContent = `${status.model} · version ${status.version}`;
    connection.textContent = status.is_draining ? "shutting down" : "live";
    connection.className = "";
    drawEngines();
    drawFigures();
    for (const chart of charts) chart.update(status.history, status.bucket_s);
  } catch (error) {
    connection.textContent = "the proxy does not answer";
    connection.className = "bad";
  }
  setTimeout(refresh, REFRESH_MS);
}

addEventListener("resize", () => { if (status) drawLinks(); });
startChat(() => status?.model);
refresh();
