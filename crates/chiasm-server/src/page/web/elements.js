// Helpers for elements and number formats. Text is always set as text, never as HTML: names of
// models, workers and requests are untrusted.

/** Creates an element with attributes and children; string children become text. */
export function element(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === true) node.setAttribute(key, "");
    else if (value !== false && value != null) node.setAttribute(key, value);
  }
  node.append(...children.filter((child) => child != null));
  return node;
}

const SVG_NAMESPACE = "http://www.w3.org/2000/svg";

/** Creates an SVG element. */
export function svgElement(name, attributes = {}, ...children) {
  const node = document.createElementNS(SVG_NAMESPACE, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

/** Sets an element's text if it differs. Most values do not change every second. */
export function setText(target, text) {
  if (target.textContent !== text) target.textContent = text;
}

/**
 * Creates a table with a caption, column heads and rows of cells, which are strings or elements.
 * The first cell of a row is its head.
 */
export function table(caption, heads, rows, attributes = {}) {
  const head = element("tr", {}, ...heads.map((text) => element("th", { scope: "col" }, text)));
  const row = ([first, ...others]) => {
    const cells = others.map((cell) => element("td", {}, cell));
    return element("tr", {}, element("th", { scope: "row" }, first), ...cells);
  };
  return element("table", attributes, element("caption", {}, caption), element("thead", {}, head),
    element("tbody", {}, ...rows.map(row)));
}

const integers = new Intl.NumberFormat("en");

/** Formats an integer. */
export const count = (number) => integers.format(number);

/** Formats a fraction as a percentage. */
export function percent(part) {
  if (part == null) return "–";
  const digits = part > 0 && part < 0.1 ? 1 : 0;
  return `${(part * 100).toFixed(digits)} %`;
}

/** Formats a number with about three digits. */
export function brief(number) {
  if (number === 0) return "0";
  const size = Math.abs(number);
  if (size >= 100) return integers.format(Math.round(number));
  return number.toFixed(size >= 10 ? 1 : 2);
}

/** Formats bytes with a unit. */
export function bytes(number) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  const power = number < 1 ? 0 : Math.min(units.length - 1, Math.floor(Math.log2(number) / 10));
  return `${brief(number / 1024 ** power)} ${units[power]}`;
}

/** Formats seconds with a unit. */
export function time(seconds) {
  if (seconds == null) return "–";
  return seconds < 1 ? `${brief(seconds * 1000)} ms` : `${brief(seconds)} s`;
}

/** Formats milliseconds since the epoch as a time of day. */
export const clock = (milliseconds) =>
  new Date(milliseconds).toLocaleTimeString([], { hour12: false });

/** Returns the colour of a hash. Different hashes usually have different colours. */
export function colour(hash) {
  const number = parseInt(hash.slice(0, 8), 16);
  return `hsl(${number % 360} ${55 + (number >>> 9) % 30}% ${52 + (number >>> 15) % 14}%)`;
}

/** Creates a spot of a hash's colour beside its first digits. */
export function identity(hash) {
  const spot = svgElement("svg", { class: "spot", viewBox: "0 0 1 1", "aria-hidden": "true" },
    svgElement("rect", { width: 1, height: 1, fill: colour(hash) }));
  return element("span", { class: "identity", title: hash }, spot, hash.slice(0, 12));
}
