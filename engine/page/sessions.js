// Sessions and memory, drawn: a history as a bar of blocks with the ring at its end, how full hot cache and ring are, who holds what.

import { bytes, colour, count, decimal, element, short } from "./format.js";

const PHASES = { held: "a caller's", request: "one request's", stored: "stored" };

export class Sessions {
  constructor(place) {
    this.place = place;
    this.rows = new Map(); // by id
    this.before = new Map(); // tokens at the last snapshot
    this.at = 0;
  }

  show(sessions, total, at) {
    const longest = Math.max(256, ...sessions.map((one) => Math.max(one.rows, one.prompt_total)));
    const spent = (at - this.at) / 1000;
    const seen = new Set();
    this.place.querySelectorAll(".empty").forEach((node) => node.remove());
    for (const [place, one] of sessions.entries()) {
      seen.add(one.id);
      const row = this.rows.get(one.id) || this.make(one.id);
      const gained = one.tokens - (this.before.get(one.id) ?? one.tokens);
      this.fill(row, one, longest, spent > 0.2 && spent < 5 ? gained / spent : 0);
      this.before.set(one.id, one.tokens);
      if (this.place.children[place] !== row.node) this.place.insertBefore(row.node, this.place.children[place] || null);
    }
    for (const [id, { node }] of [...this.rows]) {
      if (seen.has(id)) continue;
      node.remove();
      this.rows.delete(id);
      this.before.delete(id);
    }
    const hidden = total - sessions.length;
    if (!sessions.length || hidden > 0) {
      const text = hidden > 0 ? `${count(hidden)} more, of other keys or longer idle` : "No session holds rows. Send a message.";
      this.place.append(element("p", "empty", text));
    }
    this.at = at;
  }

  make(id) {
    const node = element("div", "session"), who = element("p", "who"), rows = element("div", "rows"), fills = element("div", "fills");
    const parts = { name: element("span", "mono", id.slice(0, 10)), phase: element("span", "tag"), kind: element("span", "muted"), of: element("span", "of") };
    who.append(...Object.values(parts));
    const coming = element("span", "coming"), ram = element("span", "ram"), ring = element("span", "ring");
    rows.append(coming, ram, ring);
    const hot = meter("hot"), held = meter("ring");
    fills.append(hot.node, held.node);
    node.append(who, rows, fills);
    node.dataset.session = id;
    const row = { node, ...parts, rows, coming, ram, ring, hot, held };
    this.rows.set(id, row);
    return row;
  }

  fill(row, one, longest, rate) {
    row.phase.textContent = one.phase;
    row.phase.dataset.phase = one.phase;
    row.kind.textContent = `${PHASES[one.kind] || one.kind}${rate > 0 && one.phase === "decoding" ? `, ${decimal(rate)} tokens/s` : ""}`;
    row.of.textContent = `${count(one.tokens)} tokens · ${bytes(one.host_bytes)} in RAM · ${bytes(one.device_bytes)} on the device`;
    const share = (rows) => `${(100 * rows) / longest}%`;
    const ram = Math.min(one.ram, one.rows);
    row.ram.style.width = share(ram);
    const cell = row.rows.clientWidth * (one.block_rows / longest);
    row.ram.style.backgroundSize = cell > 4 ? `${cell}px 100%` : "0 0";
    row.ring.style.left = share(ram);
    row.ring.style.width = share(Math.max(0, one.rows - ram));
    row.ring.hidden = one.rows <= ram;
    row.coming.hidden = !one.prompt_total;
    row.coming.style.width = share(one.prompt_total);
    row.rows.title = `${count(ram)} rows in RAM, ${count(one.ring)} on the device only, ${count(one.blocks)} blocks of ${one.block_rows}`;
    if (one.prompt_total) row.rows.title += `; ${count(one.prompt_rows)} of ${count(one.prompt_total)} prompt rows read`;
    row.hot.set(one.hot, one.hot_max, "hot");
    row.held.set(one.ring, one.ring_max, "ring");
  }
}

function meter(name) {
  const node = element("div", "fill"), text = element("span"), bar = element("div", "meter"), level = element("span", name);
  bar.append(level);
  node.append(bar, text);
  const set = (value, most, word) => {
    node.hidden = !most;
    level.style.width = `${most ? Math.min(100, (100 * value) / most) : 0}%`;
    text.textContent = `${word} ${short(value)} of ${short(most)} rows`;
  };
  return { node, set };
}

const OWNERS = { hot: "hot", ring: "ring", pages: "choose", blocks: "ram" };
const NAMES = { hot: "hot caches", ring: "rings", pages: "index keys", blocks: "histories", tables: "tables", "append ring": "append ring" };

export class Memory {
  constructor(place) {
    this.place = place;
    this.tiers = new Map();
  }

  show({ arena, device, rows }) {
    const free = Math.max(0, arena.total - arena.used - arena.reserved);
    this.tier("RAM, the arena", `${bytes(arena.used)} used, ${bytes(arena.reserved)} promised, of ${bytes(arena.total)}`, [
      ["used", "ram", arena.used, 1],
      ["promised", "ram", arena.reserved, 0.35],
      ["free", "sunken", free, 1],
    ], arena.total);
    const owners = Object.entries(device.held).sort((a, b) => b[1] - a[1]);
    const held = owners.reduce((sum, [, size]) => sum + size, 0);
    const parts = owners.map(([owner, size]) => [NAMES[owner] || owner, OWNERS[owner] || "plain", size, 1]);
    const most = device.budget ?? held;
    const text = `${bytes(held)} held by sessions${device.budget === null ? "" : ` of ${bytes(device.budget)}`}`;
    this.tier("Device", text, parts, Math.max(most, 1));
    return `${short(rows.ram)} rows in RAM, ${short(rows.ring)} in rings, ${short(rows.hot)} hot`;
  }

  tier(name, text, parts, most) {
    let tier = this.tiers.get(name);
    if (!tier) {
      tier = { node: element("div", "tier"), said: element("span", "muted"), bar: element("div", "bar"), keys: element("p", "keys"), spans: new Map() };
      const head = element("p", "over");
      head.append(element("b", "", name), tier.said);
      tier.node.append(head, tier.bar, tier.keys);
      this.place.append(tier.node);
      this.tiers.set(name, tier);
    }
    tier.said.textContent = text;
    const seen = new Set();
    for (const [part, paint, size, alpha] of parts) {
      seen.add(part);
      let span = tier.spans.get(part);
      if (!span) {
        span = { bar: element("span"), key: element("span"), dot: element("i"), text: element("span") };
        span.key.append(span.dot, span.text);
        tier.bar.append(span.bar);
        tier.keys.append(span.key);
        tier.spans.set(part, span);
      }
      for (const node of [span.bar, span.dot]) {
        node.style.background = `var(--${paint})`;
        node.style.opacity = alpha;
      }
      span.bar.style.width = `${(100 * size) / most}%`;
      span.bar.title = span.text.textContent = `${part} ${bytes(size)}`;
    }
    for (const [part, { bar, key }] of [...tier.spans]) {
      if (seen.has(part)) continue;
      bar.remove();
      key.remove();
      tier.spans.delete(part);
    }
  }
}
