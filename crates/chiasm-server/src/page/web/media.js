// How media items travelled, where they were found, and which come again and again.

import { bytes, count, element, identity, percent, table } from "./elements.js";

const WAYS = { cached: "held by the engine: nothing was sent", shm: "written into shared memory", inline: "inside the request's message" };
const OPENED = {
  data: "data: URLs", file: "files", fresh: "URLs that were fresh", revalidated: "URLs that had not changed", fetched: "URLs fetched",
  shared: "URLs fetched with somebody else", failed_again: "URLs that had just failed", named: "names that were known",
  unknown_name: "names that were not known",
};

export class Media {
  #media = null;
  #drawn = null;
  #root;

  constructor(root) {
    this.#root = root;
  }

  begin({ media }) {
    this.#media = media;
  }

  go({ media }) {
    this.#media = media;
  }

  draw() {
    const text = JSON.stringify(this.#media);
    if (!this.#media || text === this.#drawn) return;
    this.#drawn = text;
    const { ways, opened, decoded, reused, cached_bytes, processed_bytes, repeated } = this.#media;
    const sent = Object.values(ways).reduce((sum, items) => sum + items, 0);
    const share = (items) => percent(sent > 0 ? items / sent : null);
    const made = [["made from their bytes", count(decoded)], ["reused, made for another engine or request", count(reused)]];
    const kept = [["encoded, for later requests", bytes(cached_bytes)], ["processed, for engines without shared memory", bytes(processed_bytes)]];
    const again = repeated.map((item) => [identity(item.hash), item.modality,
      item.at_most_over > 0 ? `${count(item.times - item.at_most_over)} to ${count(item.times)}` : count(item.times)]);
    this.#root.replaceChildren(
      table("Items handed to engines", ["Way", "Items", "Share"],
        Object.entries(ways).map(([way, items]) => [WAYS[way] ?? way, count(items), share(items)])),
      table("Items asked for", ["Found as", "Items"],
        Object.entries(opened).filter(([, items]) => items > 0).map(([how, items]) => [OPENED[how] ?? how, count(items)])),
      table("Tensors", ["Were", "Items"], made),
      table("Memory for items", ["Kept", "Bytes"], kept),
      again.length > 0 ? table("Items that come again and again", ["Item", "Kind", "Requests"], again)
        : element("p", { class: "hint" }, "No media item has come more than once yet."));
  }
}
