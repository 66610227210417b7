// A line over the last three minutes: values come once a second, a gap is null.

import { colour, element, sized } from "./format.js";

const SPAN_S = 180;
const LEFT = 38, BOTTOM = 18, TOP = 6;

export class Chart {
  // series: [{name, colour}], of the page's palette; format: a value as text; top: the highest value of the axis, or null
  constructor(place, series, format, top = null) {
    this.canvas = place.querySelector("canvas");
    this.series = series;
    this.format = format;
    this.top = top;
    this.points = []; // {at: seconds, values: [number or null]}
    this.pointer = null;
    this.tip = element("div", "tip");
    this.tip.hidden = true;
    place.append(this.tip);
    this.canvas.addEventListener("pointermove", (event) => this.point(event.offsetX));
    this.canvas.addEventListener("pointerleave", () => this.point(null));
    new ResizeObserver(() => this.draw()).observe(this.canvas);
  }

  add(at, values) {
    this.points.push({ at, values });
    while (this.points.length && this.points[0].at < at - SPAN_S) this.points.shift();
    this.draw();
  }

  clear() {
    this.points = [];
    this.draw();
  }

  point(x) {
    this.pointer = x;
    this.draw();
  }

  draw() {
    const { context, width, height } = sized(this.canvas);
    if (!width) return;
    const last = this.points.length ? this.points[this.points.length - 1].at : 0;
    const most = this.top ?? nice(Math.max(1, ...this.points.flatMap(({ values }) => values.map((value) => value ?? 0))));
    const x = (at) => LEFT + ((at - last + SPAN_S) / SPAN_S) * (width - LEFT - 4);
    const y = (value) => TOP + (1 - value / most) * (height - TOP - BOTTOM);
    this.axes(context, width, height, most, y);
    this.series.forEach((one, index) => this.line(context, one, index, x, y));
    this.mark(context, width, height, x, y);
  }

  axes(context, width, height, most, y) {
    context.font = "11px system-ui, sans-serif";
    context.fillStyle = colour("muted");
    context.strokeStyle = colour("line");
    context.lineWidth = 1;
    context.textBaseline = "middle";
    context.textAlign = "right";
    for (const share of [0, 0.5, 1]) {
      const level = Math.round(y(most * share)) + 0.5;
      context.beginPath();
      context.moveTo(LEFT, level);
      context.lineTo(width, level);
      context.stroke();
      context.fillText(this.format(most * share), LEFT - 6, level);
    }
    context.textBaseline = "alphabetic";
    [["3 min ago", 0, "left"], ["now", 1, "right"]].forEach(([text, share, align]) => {
      context.textAlign = align;
      context.fillText(text, LEFT + share * (width - LEFT), height - 3);
    });
  }

  line(context, { colour: name }, index, x, y) {
    const paint = colour(name);
    for (const run of runs(this.points, index)) {
      context.beginPath();
      run.forEach(({ at, value }, place) => context[place ? "lineTo" : "moveTo"](x(at), y(value)));
      context.strokeStyle = paint;
      context.lineWidth = 2;
      context.lineJoin = "round";
      context.stroke();
      if (run.length < 2) {
        context.fillStyle = paint;
        context.fillRect(x(run[0].at) - 1, y(run[0].value) - 1, 2, 2);
        continue;
      }
      context.lineTo(x(run[run.length - 1].at), y(0));
      context.lineTo(x(run[0].at), y(0));
      context.closePath();
      context.globalAlpha = 0.13;
      context.fillStyle = paint;
      context.fill();
      context.globalAlpha = 1;
    }
  }

  // Where the pointer is: a line, and what the values were.
  mark(context, width, height, x, y) {
    this.tip.hidden = this.pointer === null || !this.points.length;
    if (this.tip.hidden) return;
    const nearest = this.points.reduce((a, b) => (Math.abs(x(b.at) - this.pointer) < Math.abs(x(a.at) - this.pointer) ? b : a));
    const place = Math.round(x(nearest.at)) + 0.5;
    context.strokeStyle = colour("muted");
    context.beginPath();
    context.moveTo(place, TOP);
    context.lineTo(place, height - BOTTOM);
    context.stroke();
    const ago = Math.round(this.points[this.points.length - 1].at - nearest.at);
    const said = this.series.map((one, index) => {
      const value = nearest.values[index];
      return `${one.name} ${value === null ? "none" : this.format(value)}`;
    });
    this.tip.textContent = `${ago ? `${ago} s ago` : "now"}: ${said.join(", ")}`;
    this.tip.style.left = `${Math.max(0, Math.min(place - this.tip.offsetWidth / 2, width - this.tip.offsetWidth))}px`;
  }
}

// Stretches of a series without gaps.
function runs(points, index) {
  const found = [];
  let run = [];
  for (const { at, values } of points) {
    if (values[index] === null) {
      if (run.length) found.push(run);
      run = [];
    } else run.push({ at, value: values[index] });
  }
  if (run.length) found.push(run);
  return found;
}

// The next of 1, 2, 5, 10, 20, ... above a value.
function nice(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= value);
}
