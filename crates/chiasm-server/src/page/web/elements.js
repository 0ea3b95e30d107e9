// Making elements, and writing numbers. Text is always set as text: names of models, workers and requests come from others.

/** An element with attributes and children; strings among these become text. */
export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === true) made.setAttribute(key, "");
    else if (value !== false && value != null) made.setAttribute(key, value);
  }
  made.append(...children.filter((child) => child != null));
  return made;
}

const SVG = "http://www.w3.org/2000/svg";

/** An element of a drawing. */
export function drawn(name, attributes = {}, ...children) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

/** Sets an element's text if it is another one: most of what is told each second is as before. */
export function write(target, text) {
  if (target.textContent !== text) target.textContent = text;
}

/** A table with a caption, column heads and rows of cells, which are strings or elements. The first cell of a row is its head. */
export function table(caption, heads, rows, attributes = {}) {
  const head = element("tr", {}, ...heads.map((text) => element("th", { scope: "col" }, text)));
  const row = ([first, ...others]) =>
    element("tr", {}, element("th", { scope: "row" }, first), ...others.map((cell) => element("td", {}, cell)));
  return element("table", attributes, element("caption", {}, caption), element("thead", {}, head),
    element("tbody", {}, ...rows.map(row)));
}

const whole = new Intl.NumberFormat("en");

export const count = (number) => whole.format(number);

export const percent = (part) => (part == null ? "–" : `${(part * 100).toFixed(part > 0 && part < 0.1 ? 1 : 0)} %`);

/** A number with about three digits. */
export function brief(number) {
  if (number === 0) return "0";
  const size = Math.abs(number);
  if (size >= 100) return whole.format(Math.round(number));
  return number.toFixed(size >= 10 ? 1 : 2);
}

/** Bytes with a unit. */
export function bytes(number) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  const power = number < 1 ? 0 : Math.min(units.length - 1, Math.floor(Math.log2(number) / 10));
  return `${brief(number / 1024 ** power)} ${units[power]}`;
}

/** A time of so many seconds with a unit. */
export function time(seconds) {
  if (seconds == null) return "–";
  return seconds < 1 ? `${brief(seconds * 1000)} ms` : `${brief(seconds)} s`;
}

/** The time of day of so many milliseconds since the epoch. */
export const clock = (milliseconds) => new Date(milliseconds).toLocaleTimeString([], { hour12: false });

/** A colour for an identity: the same for the same, and mostly another for another. */
export function colour(hash) {
  const number = parseInt(hash.slice(0, 8), 16);
  return `hsl(${number % 360} ${55 + (number >>> 9) % 30}% ${52 + (number >>> 15) % 14}%)`;
}

/** A spot of an identity's colour beside its first digits. */
export function identity(hash) {
  const spot = drawn("svg", { class: "spot", viewBox: "0 0 1 1", "aria-hidden": "true" },
    drawn("rect", { width: 1, height: 1, fill: colour(hash) }));
  return element("span", { class: "identity", title: hash }, spot, hash.slice(0, 12));
}
