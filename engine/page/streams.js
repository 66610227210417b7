// The live strip: a lane a stream, how busy it was in each bin, moving at the pace of time.

import { bytes, colour, element, percent, sized } from "./format.js";

const COLUMN_BINS = 2, COLUMN_PX = 3; // bins a column shows, and its width with the gap
const KEPT_BINS = 4000;
const BEHIND_BINS = 65; // how far the picture is behind what was heard: snapshots come once a second
const LANES = [
  ["compute", "hot"],
  ["selection", "choose"],
  ["prefetch", "ram"],
  ["copyback", "ring"],
  ["channel", "channel"],
];
const calm = window.matchMedia("(prefers-reduced-motion: reduce)");

export class Streams {
  constructor(place) {
    this.place = place;
    this.lanes = new Map();
    this.end = 0; // bins heard so far
    this.shown = 0; // the bin at the right edge, a fraction
    this.drawn = 0;
    for (const [name, paint] of LANES) this.lane(name, paint);
    const frame = (now) => {
      this.move(now);
      window.requestAnimationFrame(frame);
    };
    window.requestAnimationFrame(frame);
  }

  lane(name, paint) {
    const row = element("div", "lane absent"), canvas = element("canvas"), does = element("p", "does");
    const share = element("em"), kinds = element("span");
    does.append(share, kinds);
    row.append(element("b", "", name), canvas, does);
    row.dataset.lane = name;
    this.place.append(row);
    const lane = { row, canvas, share, kinds, paint, columns: new Map(), bytes: null };
    this.lanes.set(name, lane);
    return lane;
  }

  // streams: of a snapshot. Lanes of several stages are shown apart, by their whole names.
  add({ lanes, bin_ms }) {
    const bins = Math.max(0, ...lanes.map(({ busy }) => busy.length));
    const stages = new Set(lanes.map(({ name }) => name.split(".")[0])).size;
    for (const one of lanes) {
      const plain = one.name.split(".").pop();
      const name = stages > 1 && plain !== "channel" ? one.name : plain;
      const lane = this.lanes.get(name) || this.lane(name, (LANES.find(([known]) => known === plain) || ["", "plain"])[1]);
      lane.row.classList.remove("absent");
      one.busy.forEach((busy, place) => this.put(lane, this.end + place, busy));
      this.say(lane, one, (bins * bin_ms) / 1000);
    }
    for (const [name, lane] of this.lanes) {
      if (name === "channel" && lane.row.classList.contains("absent")) lane.kinds.textContent = "one stage, no channel";
    }
    this.end += bins;
    if (Math.abs(this.end - BEHIND_BINS - this.shown) > 150) this.shown = this.end - BEHIND_BINS;
    if (calm.matches) this.shown = this.end;
  }

  put(lane, bin, busy) {
    const column = Math.floor(bin / COLUMN_BINS);
    lane.columns.set(column, (lane.columns.get(column) || 0) + busy / COLUMN_BINS);
    lane.columns.delete(column - KEPT_BINS / COLUMN_BINS);
  }

  say(lane, { busy, kinds, bytes: moved }, spent) {
    const share = busy.length ? busy.reduce((a, b) => a + b, 0) / busy.length / 100 : 0;
    lane.share.textContent = share >= 0.0005 ? percent(share) : "idle";
    const before = lane.bytes;
    lane.bytes = moved;
    const rate = before !== null && moved > before && spent ? `${bytes((moved - before) / spent)}/s ` : "";
    lane.kinds.textContent = ` ${rate}${Object.keys(kinds).slice(0, 2).join(", ")}`;
    lane.row.title = Object.entries(kinds).map(([kind, time]) => `${kind}: ${(1000 * time).toFixed(1)} ms`).join("\n");
  }

  move(now) {
    const passed = now - (this.at ?? now);
    if (passed < 30 && this.at !== undefined) return; // thirty pictures a second are enough
    this.at = now;
    if (document.hidden) return;
    if (!calm.matches) {
      const target = this.end - BEHIND_BINS + this.since(now);
      this.shown += (passed / 20) * Math.max(0, 1 + (target - this.shown) / 100);
    }
    const right = Math.min(this.shown, this.end);
    if (right !== this.drawn) for (const lane of this.lanes.values()) this.draw(lane, right);
    this.drawn = right;
  }

  // Bins that have passed since the last snapshot was heard.
  since(now) {
    if (this.heardEnd !== this.end) [this.heardEnd, this.heardAt] = [this.end, now];
    return Math.min(60, (now - this.heardAt) / 20);
  }

  draw(lane, right) {
    const { context, width, height } = sized(lane.canvas);
    context.fillStyle = colour(lane.paint);
    const newest = right / COLUMN_BINS;
    const columns = Math.ceil(width / COLUMN_PX) + 1;
    for (let column = Math.floor(newest); column > newest - columns && column >= 0; column -= 1) {
      const busy = lane.columns.get(column);
      if (!busy) continue;
      const tall = Math.max(3, ((height - 4) * Math.min(100, busy)) / 100);
      context.globalAlpha = 0.6 + 0.4 * Math.min(1, busy / 100);
      context.fillRect(width - (newest - column) * COLUMN_PX, height - 2 - tall, COLUMN_PX - 1, tall);
    }
    context.globalAlpha = 1;
  }
}
