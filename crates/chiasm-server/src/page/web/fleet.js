// The fleet: a tile for each worker.

import { brief, bytes, count, element, percent, setText } from "./elements.js";

const GAUGES = ["KV cache in use", "Prompt tokens found", "Arena"];
/** The margin around the window in which tiles are updated, so that scrolling shows new values. */
const MARGIN = "50%";

/** The view of all workers. */
export class Fleet {
  #workers = new Map();
  #tiles = new Map();
  /** The ids of the workers whose tiles show old values. */
  #changed = new Set();
  /**
   * The ids of the workers whose tiles are in or near the window. Only these tiles are redrawn: a
   * fleet may have a thousand tiles that change each second.
   */
  #near = new Set();
  #observer = new IntersectionObserver((entries) => this.#onScroll(entries), {
    rootMargin: MARGIN,
  });
  #root;
  #filter;
  #shown;

  constructor(root, filter, shown) {
    this.#root = root;
    this.#filter = filter;
    this.#shown = shown;
    filter.addEventListener("input", () => {
      for (const id of this.#workers.keys()) this.#changed.add(id);
      this.redraw();
    });
  }

  reset({ rows }) {
    this.#workers.clear();
    this.#tiles.clear();
    this.#changed.clear();
    this.#near.clear();
    this.#observer.disconnect();
    this.#root.replaceChildren();
    this.#addRows(rows);
  }

  update({ rows, gone }) {
    for (const id of gone) {
      this.#workers.delete(id);
      this.#changed.delete(id);
      const tile = this.#tiles.get(id);
      if (!tile) continue;
      this.#observer.unobserve(tile.root);
      this.#near.delete(id);
      tile.root.remove();
      this.#tiles.delete(id);
    }
    this.#addRows(rows);
  }

  #onScroll(entries) {
    for (const { target, isIntersecting } of entries) {
      if (isIntersecting && target.isConnected) this.#near.add(target.dataset.worker);
      else this.#near.delete(target.dataset.worker);
    }
    this.redraw();
  }

  #addRows(rows) {
    for (const row of rows) {
      this.#workers.set(row.id, row);
      this.#changed.add(row.id);
    }
  }

  draw() {
    const added = document.createDocumentFragment();
    for (const id of this.#changed) {
      const row = this.#workers.get(id);
      let tile = this.#tiles.get(id);
      const isNew = !tile;
      if (isNew) {
        tile = new Tile(id);
        this.#tiles.set(id, tile);
        this.#observer.observe(tile.root);
        added.append(tile.root);
      }
      tile.root.hidden = !this.#matchesFilter(row);
      if (!isNew && !this.#near.has(id)) continue;
      tile.show(row);
      this.#changed.delete(id);
    }
    if (added.childElementCount > 0) this.#insertSorted(added);
    const all = this.#workers.size;
    const hidden = this.#root.querySelectorAll(":scope > [hidden]").length;
    setText(this.#shown, hidden > 0 ? `${count(all - hidden)} of ${count(all)}` : "");
  }

  /** Inserts tiles in the order of the workers' numbers. */
  #insertSorted(added) {
    const number = (tile) => Number(tile.dataset.worker.replace(/\D/g, ""));
    const last = this.#root.lastElementChild;
    const isInOrder = !last || number(last) < number(added.firstElementChild);
    this.#root.append(added);
    if (isInOrder) return;
    const tiles = [...this.#root.children];
    this.#root.append(...tiles.sort((a, b) => number(a) - number(b)));
  }

  #matchesFilter(row) {
    const filter = this.#filter.value.trim().toLowerCase();
    if (filter === "") return true;
    const draining = row.draining ? "draining" : "";
    return [row.id, row.runs, row.machine, row.knowledge, row.condition, row.breaker, draining]
      .some((text) => text?.toLowerCase().includes(filter));
  }
}

/** The tile of a worker. */
class Tile {
  constructor(id) {
    this.state = element("span", { class: "badge" });
    this.knowledge = element("span", { class: "badge" });
    this.runs = element("p", { class: "runs" });
    this.load = element("p", { class: "load" });
    this.gauges = GAUGES.map((name) => new Gauge(name));
    this.more = element("p", { class: "more" });
    this.root = element("article", { class: "tile", "data-worker": id },
      element("h2", {}, id, " ", this.state, " ", this.knowledge),
      this.runs, this.load, ...this.gauges.map((gauge) => gauge.root), this.more);
  }

  show(row) {
    const breaker = row.breaker == null ? null : `breaker ${row.breaker}`;
    const state = row.draining ? "draining" : breaker ?? row.condition ?? "leaving";
    showBadge(this.state, state, state === "answers");
    showBadge(this.knowledge, row.knowledge, row.knowledge === "exact");
    const machine = row.machine == null ? "this machine" : `machine ${row.machine}`;
    const role = row.role == null ? "" : `${row.role} · `;
    const unnamed = row.unnamed ? " · no longer named" : "";
    setText(this.runs, `${role}${row.runs ?? "engine"} · ${machine}${unnamed}`);
    const engine = row.running == null ? "no reports yet"
      : `${count(row.running)} running, ${count(row.waiting)} waiting`;
    setText(this.load, `${engine} · ${count(row.pending_tokens)} tokens to compute`);
    const [kv, hits, arena] = this.gauges;
    kv.show(row.kv_usage, percent(row.kv_usage));
    hits.show(row.hit_rate, percent(row.hit_rate));
    if (row.arena) {
      const { reserved, used } = row.arena;
      arena.show(reserved > 0 ? used / reserved : 0, `${bytes(used)} of ${bytes(reserved)}`);
    } else arena.show(null, "none");
    const cache = row.receiver_cache_bytes > 0 ? bytes(row.receiver_cache_bytes) : "none";
    setText(this.more, `${count(row.known_blocks)} of ${count(row.total_blocks)} blocks known · ` +
      `${count(row.promised_blocks)} promised · media cache ${cache}`);
  }
}

/** Sets the text and the colour of a badge. */
function showBadge(target, text, isHealthy) {
  setText(target, text);
  target.className = isHealthy ? "badge healthy" : "badge unhealthy";
}

/** A named bar that shows a fraction. */
class Gauge {
  constructor(name) {
    this.fill = element("span", { class: "fill" });
    this.value = element("span", { class: "value" });
    this.root = element("p", { class: "gauge" },
      element("span", { class: "name" }, name),
      this.value,
      element("span", { class: "bar", "aria-hidden": "true" }, this.fill));
  }

  show(part, text) {
    setText(this.value, text);
    const width = `${brief(Math.min(1, part ?? 0) * 100)}%`;
    if (this.fill.style.width !== width) this.fill.style.width = width;
  }
}
