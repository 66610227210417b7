// The chat box: one conversation, streamed from /v1/chat/completions. The page holds the turns; the server finds their rows again.

import { count, decimal, element, seconds } from "./format.js";
import { Refused, events } from "./wire.js";

export class Chat {
  // wantKey: called when the server refuses the key
  constructor(form, log, fresh, wantKey) {
    this.form = form;
    this.log = log;
    this.wantKey = wantKey;
    this.text = form.querySelector("#text");
    this.send = form.querySelector("#send");
    this.turns = [];
    this.abort = null;
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.abort) this.abort.abort();
      else this.say(this.text.value);
    });
    this.text.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      if (!this.abort) this.say(this.text.value);
    });
    fresh.addEventListener("click", () => {
      if (this.abort) this.abort.abort();
      this.turns = [];
      this.log.replaceChildren();
      this.text.focus();
    });
  }

  async say(text) {
    if (!text.trim()) return;
    this.text.value = "";
    const turns = this.turns;
    turns.push({ role: "user", content: text });
    this.put("user", text);
    const answer = new Answer(this.put("assistant"), () => this.follow());
    this.abort = new AbortController();
    this.send.textContent = "Stop";
    this.log.setAttribute("aria-busy", "true"); // read out once it is whole
    try {
      const options = { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(this.body()), signal: this.abort.signal };
      for await (const payload of events("/v1/chat/completions", options)) {
        if (payload !== "[DONE]") answer.take(JSON.parse(payload));
      }
    } catch (error) {
      if (error.name !== "AbortError") this.fail(error);
      else answer.reason = "stopped";
    } finally {
      this.abort = null;
      this.send.textContent = "Send";
      this.log.setAttribute("aria-busy", "false");
      answer.end();
      if (answer.failure) this.fail(new Error(answer.failure));
      if (answer.content || answer.reasoning) turns.push(answer.turn());
      else {
        turns.pop(); // nothing came: what was said may be said again
        if (this.turns === turns && !this.text.value) this.text.value = text;
      }
    }
  }

  body() {
    const limit = Number(this.form.querySelector("#max-tokens").value), heat = this.form.querySelector("#temperature").value;
    const body = { messages: this.turns, stream: true, stream_options: { include_usage: true } };
    if (limit) body.max_tokens = limit;
    if (heat !== "") body.temperature = Number(heat);
    return body;
  }

  put(role, text = "") {
    const node = element("div", `said ${role}`, text);
    this.log.append(node);
    this.log.scrollTop = this.log.scrollHeight;
    return node;
  }

  // Keep the end in view, unless the reader has scrolled away from it.
  follow() {
    if (this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < 80) this.log.scrollTop = this.log.scrollHeight;
  }

  fail(error) {
    if (error instanceof Refused && error.status === 401) this.wantKey();
    const node = this.put("failed", error instanceof TypeError ? "The server does not answer." : error.message);
    node.setAttribute("role", "alert");
  }
}

class Answer {
  constructor(node, follow) {
    this.node = node;
    this.follow = follow;
    this.content = this.reasoning = this.failure = this.reason = "";
    this.calls = [];
    this.usage = null;
    this.began = performance.now();
    this.first = null;
    this.text = element("span", "text");
    this.counts = element("span", "counts");
    node.classList.add("running");
    node.append(this.text, this.counts);
  }

  take(chunk) {
    if (chunk.error) {
      this.failure = chunk.error.message;
      return;
    }
    if (chunk.usage) this.usage = chunk.usage;
    for (const { delta, finish_reason: reason } of chunk.choices || []) {
      if (reason) this.reason = reason;
      if (!delta) continue;
      if (this.first === null && (delta.content || delta.reasoning_content || delta.tool_calls)) this.first = performance.now();
      if (delta.reasoning_content) this.think(delta.reasoning_content);
      if (delta.content) this.content += delta.content;
      for (const call of delta.tool_calls || []) this.call(call);
    }
    if (this.drawing) return;
    this.drawing = true; // a picture at a time, however many chunks come between two
    window.requestAnimationFrame(() => this.draw());
  }

  // What was said, with code between fences as code. It goes in as text, whatever it is.
  draw() {
    this.drawing = false;
    const said = [this.content, ...this.calls].filter(Boolean).join("\n");
    const parts = [];
    let reached = 0;
    for (const found of said.matchAll(/^```[^\n]*\n([\s\S]*?)(?:^```[^\n]*\n?|(?![\s\S]))/gm)) {
      parts.push(said.slice(reached, found.index), element("pre", "", found[1]));
      reached = found.index + found[0].length;
    }
    this.text.replaceChildren(...parts, said.slice(reached));
    this.follow();
  }

  think(text) {
    this.reasoning += text;
    if (!this.thought) {
      const details = element("details");
      details.open = true;
      this.thought = element("span");
      details.append(element("summary", "", "Thinking"), this.thought);
      this.node.prepend(details);
    }
    this.thought.textContent = this.reasoning;
  }

  call({ index, function: called }) {
    this.calls[index] = (this.calls[index] || "") + (called.name ? `${called.name} ` : "") + (called.arguments || "");
  }

  end() {
    this.node.classList.remove("running");
    this.draw();
    const said = [];
    if (this.usage) {
      const { completion_tokens: tokens, prompt_tokens: prompt, prompt_tokens_details: details } = this.usage;
      said.push(`${count(tokens)} tokens`);
      const spent = (performance.now() - (this.first ?? this.began)) / 1000;
      if (tokens > 1 && spent > 0) said.push(`${decimal((tokens - 1) / spent)} a second`);
      said.push(`prompt ${count(prompt)}${details?.cached_tokens ? `, ${count(details.cached_tokens)} cached` : ""}`);
    }
    if (this.first !== null) said.push(`first after ${seconds((this.first - this.began) / 1000)}`);
    if (this.reason && this.reason !== "stop") said.push(this.reason);
    this.counts.textContent = said.join(" · ");
    if (!this.text.textContent && !this.reasoning) this.node.remove();
    this.follow();
  }

  turn() {
    const turn = { role: "assistant", content: this.content };
    if (this.reasoning) turn.reasoning_content = this.reasoning;
    return turn;
  }
}
