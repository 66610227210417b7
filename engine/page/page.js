// The page: follows /v1/live, shows what it says, and lets one chat. Nothing here comes from another address.

import { Chart } from "./chart.js";
import { Chat } from "./chat.js";
import { count, decimal, percent, short } from "./format.js";
import { Memory, Sessions } from "./sessions.js";
import { Streams } from "./streams.js";
import { Refused, events, key, useKey } from "./wire.js";

const at = (id) => document.getElementById(id);
const SMOOTH = 4; // snapshots that the figures look back over

const streams = new Streams(at("streams"));
const sessions = new Sessions(at("sessions"));
const memory = new Memory(at("memory"));
const tokens = new Chart(at("tokens-chart"), [{ name: "generated", colour: "ring" }], short);
const prompts = new Chart(at("prompt-chart"), [{ name: "read", colour: "ram" }], short);
const hits = new Chart(at("hit-chart"), [{ name: "hits", colour: "hot" }], (share) => `${Math.round(100 * share)}%`, 1);
let past = []; // snapshots with counts, the newest last

function state(word, text = word) {
  at("state").dataset.state = word;
  const said = at("state").lastElementChild;
  if (said.textContent !== text) said.textContent = text; // else it would be read out every second
}

function figure(id, value, unit, more) {
  const node = at(id);
  node.textContent = value;
  if (unit) {
    const small = document.createElement("small");
    small.textContent = unit;
    node.append(small);
  }
  at(`${id}-more`).textContent = more || "\u00a0"; // a line all the same, so that nothing jumps
}

function show(seen) {
  state(seen.state);
  if (!seen.counts) return;
  at("model").textContent = seen.engine.model;
  at("about").textContent = `${seen.engine.placement}, ${short(seen.engine.context_max)} tokens of context`;
  document.title = `${seen.engine.model} · Forebay`;
  const before = past[past.length - 1];
  if (before && seen.counts.steps < before.counts.steps) reset(); // the server was started anew
  past.push(seen);
  past = past.slice(-SMOOTH - 1);
  figures(seen);
  streams.add(seen.streams);
  at("memory-more").textContent = memory.show(seen.memory);
  sessions.show(seen.sessions, Object.values(seen.counts.sessions).reduce((a, b) => a + b, 0), seen.at);
  if (past.length < 2) return;
  const last = rates(past[past.length - 2], seen);
  tokens.add(seen.at / 1000, [last.generated]);
  prompts.add(seen.at / 1000, [last.prompt]);
  hits.add(seen.at / 1000, [last.hits]);
}

function reset() {
  past = [];
  for (const chart of [tokens, prompts, hits]) chart.clear();
}

// What happened a second between two snapshots.
function rates(from, to) {
  const spent = (to.at - from.at) / 1000, gained = (name) => to.counts[name] - from.counts[name];
  const read = gained("hits") + gained("misses");
  return {
    generated: gained("generated_tokens") / spent,
    prompt: Math.max(0, gained("prompt_tokens") - gained("cached_tokens")) / spent,
    hits: read ? gained("hits") / read : null,
    misses: gained("misses") / spent,
    gap: gained("gaps") ? gained("gaps_s") / gained("gaps") : null,
    accepted: gained("drafts_proposed") ? gained("drafts_accepted") / gained("drafts_proposed") : null,
  };
}

function figures(seen) {
  const { counts } = seen, now = past.length > 1 ? rates(past[0], seen) : null;
  figure("rate", now ? decimal(now.generated) : "–", "", now ? `and ${short(Math.round(now.prompt))} read` : "");
  const all = counts.hits + counts.misses, share = now?.hits ?? (all ? counts.hits / all : null);
  figure("hits", share === null ? "–" : percent(share), "", now?.hits != null ? `${short(Math.round(now.misses))} misses/s` : "nothing read now");
  const gap = now?.gap ?? null, stalls = `${count(counts.stalls)} over 200 ms`;
  figure("gap", gap === null ? "–" : decimal(1000 * gap), gap === null ? "" : "ms", stalls);
  figure("requests", count(counts.decoding + counts.appending), "at work", `${counts.appending} reading, ${counts.waiting} waiting`);
  const drafts = now?.accepted ?? null;
  figure("generated", short(counts.generated_tokens), "tokens", drafts === null ? `${short(counts.cached_tokens)} cached` : `${percent(drafts)} of drafts accepted`);
  figure("lag", decimal(seen.loop_lag_ms), "ms", `copyback: ${count(counts.lag_rows)} rows`);
}

function askKey(show) {
  at("key-form").hidden = !show;
  if (show) at("key").focus();
}

async function follow() {
  for (let failures = 0; ; failures += 1) {
    try {
      for await (const payload of events("/v1/live", { signal: stop.signal })) {
        failures = 0;
        show(JSON.parse(payload));
      }
      if (at("state").dataset.state !== "draining") state("lost", "disconnected");
    } catch (error) {
      if (stop.signal.aborted) return;
      if (error instanceof Refused && error.status === 401) {
        state("key", "wants a key");
        askKey(true);
        await new Promise((resolve) => at("key-form").addEventListener("submit", resolve, { once: true }));
        failures = 0;
        continue;
      }
      state("lost", error instanceof Refused ? error.message : "disconnected");
    }
    await new Promise((resolve) => setTimeout(resolve, Math.min(10_000, 1000 * 2 ** Math.min(failures, 4))));
  }
}

const stop = new AbortController();
window.addEventListener("pagehide", (event) => event.persisted || stop.abort());

at("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  useKey(at("key").value.trim());
  at("key").value = "";
  askKey(false);
});
at("key-open").addEventListener("click", () => askKey(at("key-form").hidden));
for (const button of document.querySelectorAll(".views button")) {
  button.addEventListener("click", () => {
    document.body.dataset.view = button.dataset.view;
    for (const one of document.querySelectorAll(".views button")) one.setAttribute("aria-pressed", String(one === button));
  });
}
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  for (const chart of [tokens, prompts, hits]) chart.draw();
});

new Chat(at("chat-form"), at("log"), at("chat-new"), () => askKey(true));
at("key-open").title = key() ? "API key: one is in use" : "API key";
follow();
