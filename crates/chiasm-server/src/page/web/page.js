// The page: one stream of events, and the view that is chosen. Only what is shown is drawn, once for each frame at most.

import { Fleet } from "./fleet.js";
import { Media } from "./media.js";
import { Requests } from "./requests.js";
import { Time } from "./time.js";
import { count, write } from "./elements.js";

const RETRY = 2000;

const at = (id) => document.getElementById(id);
const views = {
  fleet: new Fleet(at("tiles"), at("filter"), at("shown")),
  requests: new Requests(at("list"), at("why")),
  media: new Media(at("media")),
  time: new Time(at("time")),
};
let shown = "fleet";
let isDue = false;

/** Draws the view that is shown, soon. */
function draw() {
  if (isDue) return;
  isDue = true;
  requestAnimationFrame(() => {
    isDue = false;
    views[shown].draw();
  });
}

function choose() {
  const name = location.hash.slice(1);
  if (name === "main") return;
  shown = name in views ? name : "fleet";
  for (const view of Object.keys(views)) {
    at(view).hidden = view !== shown;
    const link = document.querySelector(`nav a[href="#${view}"]`);
    if (view === shown) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  scrollTo(0, 0);
  draw();
}

function totals({ ready, in_flight, slots }) {
  write(at("totals"), `${count(ready)} workers answer · ${count(in_flight)} of ${count(slots)} requests in flight`);
}

function begin(told) {
  write(at("model"), told.model);
  document.title = `${told.model} – Chiasm`;
  at("logout").hidden = !told.has_keys;
  totals(told.totals);
  for (const view of Object.values(views)) view.begin(told);
  draw();
}

function go(told) {
  totals(told.totals);
  for (const view of Object.values(views)) view.go(told);
  draw();
}

function state(text, isWell) {
  write(at("state"), text);
  at("state").className = isWell ? "well" : "ill";
}

function connect() {
  const events = new EventSource("events");
  events.addEventListener("start", (event) => {
    state("live", true);
    begin(JSON.parse(event.data));
  });
  events.addEventListener("tick", (event) => go(JSON.parse(event.data)));
  events.addEventListener("error", async () => {
    state("not connected", false);
    // The browser itself tries again, unless it was refused.
    if (events.readyState !== EventSource.CLOSED) return;
    const answer = await fetch("session").catch(() => null);
    if (answer?.status === 401) location.reload();
    else setTimeout(connect, RETRY);
  });
}

addEventListener("hashchange", choose);
for (const view of Object.values(views)) view.redraw = draw;
choose();
connect();
