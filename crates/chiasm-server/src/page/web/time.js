// The last quarter of an hour as charts. Each chart also has its numbers as a table.

import { brief, clock, count, element, percent, svgElement, table, time } from "./elements.js";

const WIDTH = 360;
const HEIGHT = 130;
/** The margin for the round ends of lines. */
const EDGE = 4;
/** The time span of the charts. */
const SPAN_SECONDS = 15 * 60;
const QUANTILES = ["p50", "p90", "p99"];

/** The view of the charts. */
export class Time {
  #steps = [];
  #isNew = false;
  #root;
  #open = new Set();

  constructor(root) {
    this.#root = root;
  }

  reset({ steps }) {
    this.#steps = steps;
    this.#isNew = true;
  }

  update({ step }) {
    if (!step) return;
    this.#steps.push(step);
    this.#steps = this.#steps.filter(({ at }) => at > step.at - SPAN_SECONDS);
    this.#isNew = true;
  }

  draw() {
    if (!this.#isNew && this.#root.childElementCount > 0) return;
    this.#isNew = false;
    const causes = [...new Set(this.#steps.flatMap((step) => Object.keys(step.errors)))].sort();
    const charts = [
      ["Time to first token", time, QUANTILES, (step) => step.ttft ?? [null, null, null]],
      ["Between two tokens", time, QUANTILES, (step) => step.itl ?? [null, null, null]],
      ["Prompt tokens found in caches", percent, ["hit rate"], (step) => [step.hit_rate], 1],
      ["New tokens a second", brief, ["tokens"], (step) => [step.tokens]],
      ["Requests a second", brief, ["requests"], (step) => [step.requests]],
      ["Errors by cause", count, causes, (step) => causes.map((cause) => step.errors[cause] ?? 0)],
    ];
    this.#root.replaceChildren(...charts.map((chart) => this.#figure(...chart)));
  }

  #figure(title, unit, names, valuesOf, max) {
    const steps = this.#steps;
    const values = steps.map(valuesOf);
    const top = max ?? Math.max(...values.flat().filter((value) => value != null), 0);
    const last = values.at(-1) ?? [];
    const labels = names.map((name, at) => `${name} ${format(last[at], unit)}`);
    const now = labels.length > 0 ? labels.join(", ") : "none";
    const caption = element("figcaption", {}, element("strong", {}, title),
      ...labels.map((label, at) => element("span", { class: `series line${at % 6}` }, label)));
    const end = steps.at(-1)?.at ?? 0;
    const x = (step) =>
      WIDTH - EDGE - ((end - step.at) / SPAN_SECONDS) * (WIDTH - 2 * EDGE);
    const y = (value) => HEIGHT - EDGE - (top > 0 ? value / top : 0) * (HEIGHT - 20);
    const lines = names.map((_, at) =>
      svgElement("path", { d: path(steps, values, at, x, y), class: `line${at % 6}` }));
    const label = `${title}, now: ${now}`;
    const viewBox = `0 0 ${WIDTH} ${HEIGHT}`;
    const picture = svgElement("svg", { viewBox, role: "img", "aria-label": label },
      svgElement("line", { x1: 0, x2: WIDTH, y1: y(top), y2: y(top), class: "grid" }),
      svgElement("line", { x1: 0, x2: WIDTH, y1: y(0), y2: y(0), class: "grid" }),
      svgElement("text", { x: 2, y: y(top) - 3 }, unit(top)), ...lines);
    return element("figure", {}, caption, picture, this.#numbers(title, unit, names, values));
  }

  #numbers(title, unit, names, values) {
    const summary = element("summary", {}, "Numbers");
    const details = element("details", { open: this.#open.has(title) }, summary);
    const fill = () => {
      const cells = (at) => values[at].map((value) => format(value, unit));
      const rows = this.#steps.map((step, at) => [clock(step.at * 1000), ...cells(at)]);
      details.append(table(title, ["Until", ...names], rows.reverse()));
    };
    if (details.open) fill();
    details.addEventListener("toggle", () => {
      if (details.open) this.#open.add(title);
      else this.#open.delete(title);
      if (details.open && !details.querySelector("table")) fill();
    });
    return details;
  }
}

/** Formats a value, which may be missing. */
const format = (value, unit) => (value == null ? "–" : unit(value));

/** Returns the path of a line through the values, with gaps where values are missing. */
function path(steps, values, at, x, y) {
  let path = "";
  let isDown = false;
  steps.forEach((step, index) => {
    const value = values[index][at];
    if (value == null) isDown = false;
    else {
      // A single point is drawn as a dot, because of its round ends.
      const point = `${brief(x(step))} ${brief(y(value))}`;
      path += isDown ? `L${point}` : `M${point}h0`;
      isDown = true;
    }
  });
  return path;
}
