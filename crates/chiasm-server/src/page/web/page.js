// The page: receives one stream of events and draws the chosen view at most once per frame.

import { Fleet } from "./fleet.js";
import { Media } from "./media.js";
import { Requests } from "./requests.js";
import { Time } from "./time.js";
import { count, setText } from "./elements.js";

/** The pause before connecting again, in milliseconds. */
const RETRY_MS = 2000;

const byId = (id) => document.getElementById(id);
const views = {
  fleet: new Fleet(byId("tiles"), byId("filter"), byId("shown")),
  requests: new Requests(byId("list"), byId("why")),
  media: new Media(byId("media")),
  time: new Time(byId("time")),
};
let shown = "fleet";
let isDrawPending = false;

/** Draws the shown view in the next frame. */
function draw() {
  if (isDrawPending) return;
  isDrawPending = true;
  requestAnimationFrame(() => {
    isDrawPending = false;
    views[shown].draw();
  });
}

/** Shows the view in the address, or the fleet. */
function showView() {
  const name = location.hash.slice(1);
  if (name === "main") return;
  shown = name in views ? name : "fleet";
  for (const view of Object.keys(views)) {
    byId(view).hidden = view !== shown;
    const link = document.querySelector(`nav a[href="#${view}"]`);
    if (view === shown) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  scrollTo(0, 0);
  draw();
}

/** Shows the fleet's totals. */
function showTotals({ ready, in_flight, slots }) {
  const requests = `${count(in_flight)} of ${count(slots)} requests in flight`;
  setText(byId("totals"), `${count(ready)} workers answer · ${requests}`);
}

/** Handles the complete state, which is the first event of a connection. */
function reset(data) {
  setText(byId("model"), data.model);
  document.title = `${data.model} – Chiasm`;
  byId("logout").hidden = !data.has_keys;
  showTotals(data.totals);
  for (const view of Object.values(views)) view.reset(data);
  draw();
}

/** Handles the changes of one second. */
function update(data) {
  showTotals(data.totals);
  for (const view of Object.values(views)) view.update(data);
  draw();
}

/** Shows the state of the connection. */
function showState(text, isHealthy) {
  setText(byId("state"), text);
  byId("state").className = isHealthy ? "healthy" : "unhealthy";
}

/** Connects to the stream of events. */
function connect() {
  const events = new EventSource("events");
  events.addEventListener("start", (event) => {
    showState("live", true);
    reset(JSON.parse(event.data));
  });
  events.addEventListener("tick", (event) => update(JSON.parse(event.data)));
  events.addEventListener("error", async () => {
    showState("not connected", false);
    // The browser reconnects automatically unless the server refused the connection.
    if (events.readyState !== EventSource.CLOSED) return;
    const answer = await fetch("session").catch(() => null);
    if (answer?.status === 401) location.reload();
    else setTimeout(connect, RETRY_MS);
  });
}

addEventListener("hashchange", showView);
for (const view of Object.values(views)) view.redraw = draw;
showView();
connect();
