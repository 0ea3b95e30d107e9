// The last requests and the explanations of their routes.

import {
  brief, clock, colour, count, element, identity, percent, setText, svgElement, table, time,
} from "./elements.js";

/** The maximum number of listed requests. */
const MAX_REQUESTS = 100;
/** The number of candidates that are shown initially. */
const FIRST_CANDIDATES = 64;
/** The terms of a worker's cost, in the server's order. */
const TERMS = [
  ["M", "blocks of 16 tokens to compute"],
  ["F", "blocks to load from the CPU or storage"],
  ["E", "blocks of embeddings to encode"],
  ["P", "blocks of embeddings to process"],
  ["W", "cost of waiting requests"],
  ["B", "blocks in use"],
  ["X", "cost of recent work above the mean"],
];

/** The view of the last requests. */
export class Requests {
  #requests = new Map();
  #rows = new Map();
  #changed = new Set();
  #chosen = null;
  #body;
  #explanation;

  constructor(root, explanation) {
    const heads = ["Request", "Time", "Worker", "Held", "Status", "First token"];
    const list = table("The last explained requests, newest first", heads, []);
    this.#body = list.tBodies[0];
    this.#explanation = explanation;
    root.append(list);
    this.#body.addEventListener("keydown", (event) => this.#moveFocus(event));
  }

  reset({ requests }) {
    this.#requests.clear();
    this.#rows.clear();
    this.#body.replaceChildren();
    this.#addRequests(requests);
  }

  update({ requests }) {
    this.#addRequests(requests);
  }

  #addRequests(requests) {
    for (const request of requests) {
      this.#requests.set(request.number, request);
      this.#changed.add(request.number);
    }
    const numbers = [...this.#requests.keys()].sort((a, b) => a - b);
    for (const number of numbers.slice(0, -MAX_REQUESTS)) {
      this.#requests.delete(number);
      this.#rows.get(number)?.root.remove();
      this.#rows.delete(number);
    }
  }

  draw() {
    for (const number of [...this.#changed].sort((a, b) => a - b)) {
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

  /** Moves the focus from request to request with the arrow keys. */
  #moveFocus(event) {
    const siblings = { ArrowDown: "nextElementSibling", ArrowUp: "previousElementSibling" };
    const sibling = siblings[event.key];
    const next = sibling && event.target.closest("tr")?.[sibling]?.querySelector("button");
    if (!next) return;
    event.preventDefault();
    next.focus();
  }

  /** Fetches and shows the explanation of a request. */
  async choose(number) {
    this.#chosen = number;
    for (const [other, row] of this.#rows) row.choose(other === number);
    const answer = await fetch(`requests/${number}`).catch(() => null);
    const route = answer?.ok ? await answer.json() : null;
    // Another request may have been chosen in the meantime.
    if (this.#chosen !== number) return;
    const shown = route ? explanationElements(route)
      : [element("p", { class: "hint" }, "This request is no longer known.")];
    this.#explanation.replaceChildren(...shown);
  }
}

/** The row of a request. */
class Row {
  constructor(request, choose) {
    const attributes = { type: "button", title: request.id, "aria-pressed": "false" };
    this.button = element("button", attributes, shortId(request.id));
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
    const held = `${request.overlap}/${request.blocks}`;
    const texts = [clock(request.at), request.worker, held, status, time(outcome?.ttft)];
    this.cells.forEach((cell, at) => setText(cell, texts[at]));
  }
}

const shortId = (id) => (id.length > 12 ? `${id.slice(0, 11)}…` : id);

/** Creates the elements that explain a route. */
function explanationElements(route) {
  const { request, candidates } = route;
  const sorted = [...candidates].sort((a, b) =>
    a.cost - b.cost || (a.worker === request.worker ? -1 : 1));
  const items = new Map(route.plans.flatMap((plan) => plan.items).map((item) => [item.hash, item]));
  const legend = element("p", { class: "legend" },
    ...[
      ["held", "held"],
      ["promised", "promised by requests in flight"],
      ["lower", "on the CPU or in storage"],
      ["compute", "to compute"],
    ].map(([name, text]) => element("span", {}, legendKey(name), ` ${text}`)),
    element("span", {}, legendKey("text"), " text"),
    ...[...items.values()].map((item) =>
      element("span", {}, `${item.modality} `, identity(item.hash))));
  const body = element("tbody");
  const more = element("p");
  const show = (rows) => body.append(...rows.map((candidate) => candidateRow(route, candidate)));
  show(sorted.slice(0, FIRST_CANDIDATES));
  if (sorted.length > FIRST_CANDIDATES) {
    const text = `Show all ${count(sorted.length)} candidates`;
    const all = element("button", { type: "button" }, text);
    all.addEventListener("click", () => {
      show(sorted.slice(FIRST_CANDIDATES));
      more.remove();
    });
    more.append(all);
  }
  const caption = element("caption", {},
    "Candidates by cost, lowest first. The weight of each term is below its name.");
  return [
    element("h2", {}, `Why ${request.worker}`),
    element("p", { class: "decision" }, decisionText(route)),
    legend,
    element("div", { class: "wide" },
      element("table", { class: "candidates" }, caption, candidatesHead(route), body)),
    more,
  ];
}

/** Describes the decision and its result. */
function decisionText({ request, decision, policy, candidates, busy }) {
  const others = busy > 0 ? ` ${count(busy)} more were too busy.` : "";
  const reason = {
    cost: `Lowest cost of ${count(candidates.length)} candidates (policy ${policy}).`,
    session: "An earlier request of the session went there.",
    policy: `Policy ${policy}, which compares no costs, ` +
      `among ${count(candidates.length)} candidates.`,
  }[decision];
  const chosen = candidates.find((candidate) => candidate.worker === request.worker);
  const { outcome, moved } = request;
  const tokens = outcome?.found;
  const hitRate = tokens && percent(tokens.cached_tokens / request.prompt_tokens);
  const result = tokens && chosen
    ? ` The worker held ${chosen.overlap} of ${chosen.blocks} blocks; the engine found ` +
      `${count(tokens.cached_tokens)} of ${count(request.prompt_tokens)} tokens in its cache ` +
      `(${hitRate}). ` +
      `${count(tokens.completion_tokens)} tokens came within ${time(outcome.total)}.`
    : moved ? " The worker refused the request or died, so it moved to another worker." : "";
  return `Request ${request.id}. ${reason}${others}${result}`;
}

/** Creates the head of the table of candidates. */
function candidatesHead({ weights }) {
  const head = (...children) => element("th", { scope: "col" }, ...children);
  const terms = TERMS.map(([name, meaning], at) =>
    head(element("abbr", { title: meaning }, name),
      element("small", {}, `× ${brief(weights[at])}`)));
  return element("thead", {},
    element("tr", {}, head("Worker"), head("Prompt on the worker"), ...terms, head("Cost")));
}

/** Creates the row of a candidate. */
function candidateRow(route, candidate) {
  const isChosen = candidate.worker === route.request.worker;
  const plan = route.plans.find((plan) => plan.class === candidate.class) ?? route.plans[0];
  return element("tr", { class: isChosen ? "chosen" : null },
    element("th", { scope: "row" }, candidate.worker,
      isChosen ? element("small", {}, "chosen") : null),
    element("td", { class: "strip" }, promptStrip(candidate, plan)),
    ...candidate.terms.map((term) => element("td", {}, brief(term))),
    element("td", {}, route.decision === "cost" ? brief(candidate.cost) : "–"));
}

/**
 * Draws the prompt as a strip of blocks. The colour of a part shows its item, and the opacity its
 * state on the worker.
 */
function promptStrip({ block_size, blocks, overlap, expected, loadable }, plan) {
  const total = Math.max(1, plan.prompt_tokens / block_size);
  const covered = Math.max(expected, loadable);
  const states = [
    ["held", 0, overlap],
    ["promised", overlap, expected],
    ["lower", expected, covered],
    ["compute", covered, total],
  ];
  const parts = promptParts(plan, block_size, total);
  const rects = [];
  for (const [state, from, to] of states) {
    for (const part of parts) {
      const start = Math.max(from, part.from);
      const end = Math.min(to, part.to);
      if (end > start) {
        const fill = part.hash ? { fill: colour(part.hash) } : {};
        const kind = `${state} ${part.hash ? "item" : "text"}`;
        const area = { x: start, y: 0, width: end - start, height: 1 };
        rects.push(svgElement("rect", { ...area, class: kind, ...fill }));
      }
    }
  }
  const lines = blocks <= 100 ? Array.from({ length: blocks - 1 }, (_, at) =>
    svgElement("line", { x1: at + 1, x2: at + 1, y1: 0, y2: 1, class: "edge" })) : [];
  const text = `${overlap} of ${blocks} blocks held, ` +
    `${Math.max(0, expected - overlap)} promised, ` +
    `${Math.max(0, covered - expected)} in lower tiers, ` +
    `${Math.max(0, blocks - covered)} to compute`;
  const attributes = { viewBox: `0 0 ${total} 1`, preserveAspectRatio: "none", role: "img" };
  return svgElement("svg", { ...attributes, "aria-label": text },
    svgElement("title", {}, text), ...rects, ...lines);
}

/** Returns the text and the items of a prompt in order, in blocks. */
function promptParts(plan, blockSize, total) {
  const parts = [];
  let at = 0;
  const items = [...plan.items].sort((a, b) => a.offset - b.offset);
  for (const { hash, offset, length } of items) {
    const from = offset / blockSize;
    const to = (offset + length) / blockSize;
    if (from > at) parts.push({ from: at, to: from });
    parts.push({ from, to, hash });
    at = to;
  }
  if (at < total) parts.push({ from: at, to: total });
  return parts;
}

/** Creates a sample for the legend. */
function legendKey(name) {
  const kind = name === "text" ? "held text" : `${name} sample`;
  return svgElement("svg", { class: "spot", viewBox: "0 0 1 1", "aria-hidden": "true" },
    svgElement("rect", { width: 1, height: 1, class: kind }));
}
