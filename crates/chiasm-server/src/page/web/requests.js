// The last requests, and why each went where it went.

import { brief, clock, colour, count, drawn, element, identity, percent, table, time, write } from "./elements.js";

const KEPT = 100;
/** Candidates that are shown at first. */
const FIRST = 64;
const TERMS = [
  ["M", "blocks of 16 tokens to compute"],
  ["F", "blocks to load from the CPU or storage"],
  ["E", "blocks of embeddings to encode"],
  ["P", "blocks of embeddings to process"],
  ["W", "cost of the requests that wait there"],
  ["B", "blocks in use"],
  ["X", "cost of what it did lately beyond the mean"],
];

export class Requests {
  #requests = new Map();
  #rows = new Map();
  #changed = new Set();
  #chosen = null;
  #body;
  #why;

  constructor(root, why) {
    const heads = ["Request", "Time", "Worker", "Held", "Status", "First token"];
    const list = table("The last requests that were explained, newest first", heads, []);
    this.#body = list.tBodies[0];
    this.#why = why;
    root.append(list);
    this.#body.addEventListener("keydown", (event) => this.#move(event));
  }

  begin({ requests }) {
    this.#requests.clear();
    this.#rows.clear();
    this.#body.replaceChildren();
    this.#take(requests);
  }

  go({ requests }) {
    this.#take(requests);
  }

  #take(requests) {
    for (const request of requests) {
      this.#requests.set(request.number, request);
      this.#changed.add(request.number);
    }
    for (const number of [...this.#requests.keys()].sort((one, other) => one - other).slice(0, -KEPT)) {
      this.#requests.delete(number);
      this.#rows.get(number)?.root.remove();
      this.#rows.delete(number);
    }
  }

  draw() {
    for (const number of [...this.#changed].sort((one, other) => one - other)) {
      const request = this.#requests.get(number);
      if (!request) continue;
      let row = this.#rows.get(number);
      if (!row) {
        row = new Row(request, () => this.choose(number));
        this.#rows.set(number, row);
        this.#body.prepend(row.root);
      }
      row.show(request);
    }
    this.#changed.clear();
  }

  /** Arrows go from request to request. */
  #move(event) {
    const towards = { ArrowDown: "nextElementSibling", ArrowUp: "previousElementSibling" }[event.key];
    const next = towards && event.target.closest("tr")?.[towards]?.querySelector("button");
    if (!next) return;
    event.preventDefault();
    next.focus();
  }

  async choose(number) {
    this.#chosen = number;
    for (const [other, row] of this.#rows) row.choose(other === number);
    const answer = await fetch(`requests/${number}`).catch(() => null);
    const why = answer?.ok ? await answer.json() : null;
    // Another one may have been chosen meanwhile.
    if (this.#chosen !== number) return;
    const shown = why ? explained(why) : [element("p", { class: "hint" }, "This request is not known any more.")];
    this.#why.replaceChildren(...shown);
  }
}

class Row {
  constructor(request, choose) {
    this.button = element("button", { type: "button", title: request.id, "aria-pressed": "false" }, short(request.id));
    this.button.addEventListener("click", choose);
    this.cells = Array.from({ length: 5 }, () => element("td"));
    this.root = element("tr", {}, element("th", { scope: "row" }, this.button), ...this.cells);
  }

  choose(isChosen) {
    this.button.setAttribute("aria-pressed", String(isChosen));
  }

  show(request) {
    const { outcome } = request;
    const broken = outcome?.stream && outcome.stream !== "finished" ? `, ${outcome.stream}` : "";
    const status = outcome ? `${outcome.status}${broken}` : request.moved ? "moved" : "running";
    const texts = [clock(request.at), request.worker, `${request.overlap}/${request.blocks}`, status, time(outcome?.ttft)];
    this.cells.forEach((cell, at) => write(cell, texts[at]));
  }
}

const short = (id) => (id.length > 12 ? `${id.slice(0, 11)}…` : id);

/** The elements that explain a choice. */
function explained(why) {
  const { request, candidates } = why;
  const sorted = [...candidates].sort((one, other) => one.cost - other.cost || (one.worker === request.worker ? -1 : 1));
  const items = new Map(why.plans.flatMap((plan) => plan.items).map((item) => [item.hash, item]));
  const legend = element("p", { class: "legend" },
    ...[["held", "held"], ["promised", "promised by requests in flight"], ["lower", "on the CPU or in storage"], ["compute", "to compute"]]
      .map(([name, text]) => element("span", {}, key(name), ` ${text}`)),
    element("span", {}, key("text"), " text"),
    ...[...items.values()].map((item) => element("span", {}, `${item.modality} `, identity(item.hash))));
  const body = element("tbody");
  const more = element("p");
  const show = (rows) => body.append(...rows.map((candidate) => candidateRow(why, candidate)));
  show(sorted.slice(0, FIRST));
  if (sorted.length > FIRST) {
    const all = element("button", { type: "button" }, `Show all ${count(sorted.length)} candidates`);
    all.addEventListener("click", () => {
      show(sorted.slice(FIRST));
      more.remove();
    });
    more.append(all);
  }
  return [element("h2", {}, `Why ${request.worker}`), element("p", { class: "decision" }, decided(why)), legend,
    element("div", { class: "wide" }, element("table", { class: "candidates" },
      element("caption", {}, "Candidates, the lowest cost first. Below each term what one of it counts for."), heads(why), body)), more];
}

function decided({ request, decision, policy, candidates, busy }) {
  const others = busy > 0 ? ` ${count(busy)} more were too busy.` : "";
  const reason = {
    cost: `Lowest cost of ${count(candidates.length)} candidates (policy ${policy}).`,
    session: "An earlier request of its session went there.",
    policy: `Policy ${policy}, which compares no costs, among ${count(candidates.length)} candidates.`,
  }[decision];
  const chosen = candidates.find((candidate) => candidate.worker === request.worker);
  const { outcome, moved } = request;
  const came = outcome?.found;
  const found = came && chosen
    ? ` It held ${chosen.overlap} of ${chosen.blocks} blocks; the engine found ${count(came.cached_tokens)} of ` +
      `${count(request.prompt_tokens)} tokens in its cache (${percent(came.cached_tokens / request.prompt_tokens)}). ` +
      `${count(came.completion_tokens)} tokens came within ${time(outcome.total)}.`
    : moved ? " It was not taken there, or lost, and went to another worker." : "";
  return `Request ${request.id}. ${reason}${others}${found}`;
}

function heads({ weights }) {
  const terms = TERMS.map(([name, meaning], at) =>
    element("th", { scope: "col" }, element("abbr", { title: meaning }, name), element("small", {}, `× ${brief(weights[at])}`)));
  return element("thead", {}, element("tr", {}, element("th", { scope: "col" }, "Worker"),
    element("th", { scope: "col" }, "Prompt there"), ...terms, element("th", { scope: "col" }, "Cost")));
}

function candidateRow(why, candidate) {
  const isChosen = candidate.worker === why.request.worker;
  const plan = why.plans.find((plan) => plan.class === candidate.class) ?? why.plans[0];
  return element("tr", { class: isChosen ? "chosen" : null },
    element("th", { scope: "row" }, candidate.worker, isChosen ? element("small", {}, "chosen") : null),
    element("td", { class: "strip" }, strip(candidate, plan)),
    ...candidate.terms.map((term) => element("td", {}, brief(term))),
    element("td", {}, why.decision === "cost" ? brief(candidate.cost) : "–"));
}

/** The prompt as a strip of blocks: its colour is what a part is, its strength what the worker has of it. */
function strip({ block_size, blocks, overlap, expected, loadable }, plan) {
  const total = Math.max(1, plan.prompt_tokens / block_size);
  const covered = Math.max(expected, loadable);
  const states = [["held", 0, overlap], ["promised", overlap, expected], ["lower", expected, covered], ["compute", covered, total]];
  const parts = partsOf(plan, block_size, total);
  const rects = [];
  for (const [state, from, to] of states) {
    for (const part of parts) {
      const [start, end] = [Math.max(from, part.from), Math.min(to, part.to)];
      if (end > start) {
        const fill = part.hash ? { fill: colour(part.hash) } : {};
        rects.push(drawn("rect", { x: start, y: 0, width: end - start, height: 1, class: `${state} ${part.hash ? "item" : "text"}`, ...fill }));
      }
    }
  }
  const lines = blocks <= 100 ? Array.from({ length: blocks - 1 }, (_, at) =>
    drawn("line", { x1: at + 1, x2: at + 1, y1: 0, y2: 1, class: "edge" })) : [];
  const text = `${overlap} of ${blocks} blocks held, ${Math.max(0, expected - overlap)} promised, ` +
    `${Math.max(0, covered - expected)} in lower tiers, ${Math.max(0, blocks - covered)} to compute`;
  return drawn("svg", { viewBox: `0 0 ${total} 1`, preserveAspectRatio: "none", role: "img", "aria-label": text },
    drawn("title", {}, text), ...rects, ...lines);
}

/** Text and items in order, in blocks. */
function partsOf(plan, blockSize, total) {
  const parts = [];
  let at = 0;
  for (const { hash, offset, length } of [...plan.items].sort((one, other) => one.offset - other.offset)) {
    const [from, to] = [offset / blockSize, (offset + length) / blockSize];
    if (from > at) parts.push({ from: at, to: from });
    parts.push({ from, to, hash });
    at = to;
  }
  if (at < total) parts.push({ from: at, to: total });
  return parts;
}

/** A spot for the legend. */
const key = (name) => drawn("svg", { class: "spot", viewBox: "0 0 1 1", "aria-hidden": "true" },
  drawn("rect", { width: 1, height: 1, class: name === "text" ? "held text" : `${name} sample` }));
