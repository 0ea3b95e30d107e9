// The last quarter of an hour, as charts. Each has its numbers as a table, too.

import { brief, clock, count, drawn, element, percent, table, time } from "./elements.js";

const WIDTH = 360;
const HEIGHT = 130;
/** Room for a line's end. */
const EDGE = 4;
const SPAN = 15 * 60;
const PARTS = ["p50", "p90", "p99"];

export class Time {
  #steps = [];
  #isNew = false;
  #root;
  #open = new Set();

  constructor(root) {
    this.#root = root;
  }

  begin({ steps }) {
    this.#steps = steps;
    this.#isNew = true;
  }

  go({ step }) {
    if (!step) return;
    this.#steps.push(step);
    this.#steps = this.#steps.filter(({ at }) => at > step.at - SPAN);
    this.#isNew = true;
  }

  draw() {
    if (!this.#isNew && this.#root.childElementCount > 0) return;
    this.#isNew = false;
    const causes = [...new Set(this.#steps.flatMap((step) => Object.keys(step.errors)))].sort();
    const charts = [
      ["Time to first token", time, PARTS, (step) => step.ttft ?? [null, null, null]],
      ["Between two tokens", time, PARTS, (step) => step.itl ?? [null, null, null]],
      ["Prompt tokens found in caches", percent, ["hit rate"], (step) => [step.hit_rate], 1],
      ["New tokens a second", brief, ["tokens"], (step) => [step.tokens]],
      ["Requests a second", brief, ["requests"], (step) => [step.requests]],
      ["Errors by cause", count, causes, (step) => causes.map((cause) => step.errors[cause] ?? 0)],
    ];
    this.#root.replaceChildren(...charts.map((chart) => this.#figure(...chart)));
  }

  #figure(title, unit, names, valuesOf, most) {
    const steps = this.#steps;
    const values = steps.map(valuesOf);
    const top = most ?? Math.max(...values.flat().filter((value) => value != null), 0);
    const last = values.at(-1) ?? [];
    const now = names.length > 0 ? names.map((name, at) => `${name} ${last[at] == null ? "–" : unit(last[at])}`).join(", ") : "none";
    const caption = element("figcaption", {}, element("strong", {}, title),
      ...names.map((name, at) => element("span", { class: `series line${at % 6}` }, `${name} ${last[at] == null ? "–" : unit(last[at])}`)));
    const end = steps.at(-1)?.at ?? 0;
    const x = (step) => WIDTH - EDGE - ((end - step.at) / SPAN) * (WIDTH - 2 * EDGE);
    const y = (value) => HEIGHT - EDGE - (top > 0 ? value / top : 0) * (HEIGHT - 20);
    const lines = names.map((_, at) => drawn("path", { d: pathOf(steps, values, at, x, y), class: `line${at % 6}` }));
    const picture = drawn("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": `${title}, now: ${now}` },
      drawn("line", { x1: 0, x2: WIDTH, y1: y(top), y2: y(top), class: "grid" }),
      drawn("line", { x1: 0, x2: WIDTH, y1: y(0), y2: y(0), class: "grid" }),
      drawn("text", { x: 2, y: y(top) - 3 }, unit(top)), ...lines);
    return element("figure", {}, caption, picture, this.#numbers(title, unit, names, values));
  }

  #numbers(title, unit, names, values) {
    const details = element("details", { open: this.#open.has(title) }, element("summary", {}, "Numbers"));
    const fill = () => {
      const rows = this.#steps.map((step, at) => [clock(step.at * 1000), ...values[at].map((value) => (value == null ? "–" : unit(value)))]);
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

/** A line through the values that there are; where there is none it breaks off. */
function pathOf(steps, values, at, x, y) {
  let path = "";
  let isDown = false;
  steps.forEach((step, index) => {
    const value = values[index][at];
    if (value == null) isDown = false;
    else {
      // A single point is seen as a dot, by its round ends.
      path += isDown ? `L${brief(x(step))} ${brief(y(value))}` : `M${brief(x(step))} ${brief(y(value))}h0`;
      isDown = true;
    }
  });
  return path;
}
