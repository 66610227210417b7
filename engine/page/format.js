// Numbers as people read them, and elements as code makes them. Text goes in as text, never as markup.

const whole = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });
const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

export function count(value) {
  return whole.format(value);
}

export function short(value) {
  if (value < 10_000) return whole.format(value);
  if (value < 1e6) return `${(value / 1e3).toFixed(value < 1e5 ? 1 : 0)}k`;
  return `${(value / 1e6).toFixed(value < 1e8 ? 2 : 0)}M`;
}

export function decimal(value) {
  return value >= 100 ? whole.format(value) : value.toFixed(value >= 10 ? 1 : 2);
}

export function bytes(value) {
  let size = value, unit = 0;
  while (size >= 1024 && unit < UNITS.length - 1) {
    size /= 1024;
    unit += 1;
  }
  return `${unit && size < 100 ? size.toFixed(1) : Math.round(size)} ${UNITS[unit]}`;
}

export function percent(share) {
  return `${(100 * share).toFixed(share >= 0.9995 ? 0 : 1)}%`;
}

export function seconds(value) {
  return value < 1 ? `${Math.round(1000 * value)} ms` : `${value.toFixed(1)} s`;
}

export function element(kind, name = "", text = "") {
  const made = document.createElement(kind);
  if (name) made.className = name;
  if (text) made.textContent = text;
  return made;
}

export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

// A canvas at the size it has on the screen; its context draws in CSS pixels.
export function sized(canvas) {
  const scale = window.devicePixelRatio || 1, width = canvas.clientWidth, height = canvas.clientHeight;
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
  }
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  return { context, width, height };
}
