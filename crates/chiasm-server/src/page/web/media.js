// Transfers of media items, their sources, and the most frequent items.

import { bytes, count, element, identity, percent, table } from "./elements.js";

/** Descriptions of transfers. */
const TRANSFERS = {
  cached: "already in the engine: nothing sent",
  shm: "written into shared memory",
  inline: "inside the request's message",
};
/** Descriptions of sources. */
const SOURCES = {
  data: "data: URLs",
  file: "files",
  fresh: "URLs in the cache, fresh",
  revalidated: "URLs in the cache, revalidated",
  fetched: "URLs fetched",
  shared: "URLs that another request was fetching",
  failed_again: "URLs that failed recently",
  named: "known names",
  unknown_name: "unknown names",
};

/** The view of all media items. */
export class Media {
  #media = null;
  #drawn = null;
  #root;

  constructor(root) {
    this.#root = root;
  }

  reset({ media }) {
    this.#media = media;
  }

  update({ media }) {
    this.#media = media;
  }

  draw() {
    const text = JSON.stringify(this.#media);
    if (!this.#media || text === this.#drawn) return;
    this.#drawn = text;
    const { ways, opened, decoded, reused, cached_bytes, processed_bytes, repeated } = this.#media;
    const sent = Object.values(ways).reduce((sum, items) => sum + items, 0);
    const share = (items) => percent(sent > 0 ? items / sent : null);
    const transfers = Object.entries(ways)
      .map(([way, items]) => [TRANSFERS[way] ?? way, count(items), share(items)]);
    const sources = Object.entries(opened)
      .filter(([, items]) => items > 0)
      .map(([source, items]) => [SOURCES[source] ?? source, count(items)]);
    const tensors = [
      ["processed", count(decoded)],
      ["reused from another engine or request", count(reused)],
    ];
    const memory = [
      ["encoded, for later requests", bytes(cached_bytes)],
      ["processed, for engines without shared memory", bytes(processed_bytes)],
    ];
    const frequent = repeated.map(({ hash, modality, times, at_most_over }) => {
      const requests = at_most_over > 0 ? `${count(times - at_most_over)} to ${count(times)}`
        : count(times);
      return [identity(hash), modality, requests];
    });
    this.#root.replaceChildren(
      table("Items for engines", ["Transfer", "Items", "Share"], transfers),
      table("Requested items", ["Source", "Items"], sources),
      table("Tensors", ["Origin", "Items"], tensors),
      table("Memory for items", ["Form", "Bytes"], memory),
      frequent.length > 0
        ? table("Items that come again and again", ["Item", "Kind", "Requests"], frequent)
        : element("p", { class: "hint" }, "No media item has come more than once yet."));
  }
}
