// Connects the event stream with the parts of the page. The server sends everything at first ("hello"), then news.

import { Charts } from "./charts.js";
import { byId, element, setText } from "./dom.js";
import { clock, megabytes, number, percent } from "./format.js";
import { executorMeter, Meters, streamMeter } from "./meters.js";
import { Pipeline } from "./pipeline.js";
import { Requests } from "./requests.js";
import { TraceDialog } from "./trace.js";

const SILENT_MS = 4000;
const RECONNECT_MS = 2000;

const pipeline = new Pipeline(byId("pipeline"));
const charts = new Charts();
const executors = new Meters(byId("executors"));
const streams = new Meters(byId("streams"));
const dialog = new TraceDialog();
const requests = new Requests(byId("requests"), byId("empty"), (name, opener) => dialog.open(name, opener));
let heardMs = 0;
let shown = null;

function showOverview({ overview, requests_held, spans_dropped, trace_share }) {
  shown = overview;
  heardMs = performance.now();
  byId("lost").hidden = true;
  const state = byId("state");
  state.className = `state ${overview.health}`;
  setText(state, overview.state);
  setText(byId("identity"), [overview.models.join(", "), overview.version && `version ${overview.version}`].filter(Boolean).join(" · "));
  document.title = overview.health === "bad" ? "✕ Natterjack console" : "Natterjack console";
  pipeline.show(overview);
  executors.show(overview.executors.map(executorMeter));
  streams.show(overview.streams.map(streamMeter));
  setText(byId("cache"), cacheText(overview));
  showInstances(overview.roles);
  const dropped = spans_dropped ? `, ${number(spans_dropped)} spans could not be sent` : "";
  const share = trace_share < 1 ? `, 1 in ${number(1 / trace_share)} traced while so many pass` : "";
  setText(byId("held"), requests_held ? `${number(requests_held)} remembered${share}${dropped}` : "");
  requests.explain(emptyText(overview));
}

function cacheText(overview) {
  const share = overview.cached_share == null ? "no prompts lately" : `${percent(overview.cached_share)} of prompt tokens from the prefix cache`;
  const preemptions = overview.preemptions_per_s ? ` · ${number(overview.preemptions_per_s)} preemptions/s` : "";
  return (overview.executors.length ? "" : "No executor has loaded its engine. ") + share + preemptions;
}

function emptyText(overview) {
  const isBusy = overview.point.requests_per_s > 0 || overview.point.running > 0;
  if (isBusy) return "Requests pass, but their spans do not arrive: see telemetry.console_spans.";
  return "No requests yet. The first one will stand here a moment after it was sent.";
}

function showInstances(roles) {
  const rows = roles.flatMap((view) =>
    view.instances.map((instance) =>
      element(
        "tr",
        {},
        element("td", {}, instance.name),
        element("td", {}, view.role),
        element("td", { class: instance.health }, instance.detail && instance.health !== "ok" ? `${instance.state} (${instance.detail})` : instance.state),
        element("td", { class: "number" }, percent(instance.cpu)),
        element("td", { class: "number" }, megabytes(instance.memory_bytes)),
      ),
    ),
  );
  byId("instances").tBodies[0].replaceChildren(...rows);
}

function connect() {
  const source = new EventSource("/console/events");
  source.addEventListener("hello", (event) => {
    const news = JSON.parse(event.data);
    showOverview(news);
    charts.reset(news.history);
    requests.reset(news.requests);
  });
  source.addEventListener("tick", (event) => {
    const news = JSON.parse(event.data);
    showOverview(news);
    charts.add(news.overview.point);
    requests.show(news.requests);
  });
  source.addEventListener("error", () => {
    if (source.readyState === EventSource.CLOSED) setTimeout(connect, RECONNECT_MS); // refused; a lost one comes back by itself
  });
}

// A page that hears nothing says so, whatever the browser thinks of the connection.
setInterval(() => {
  if (performance.now() - heardMs < SILENT_MS) return;
  const since = shown ? ` What is shown is of ${clock(shown.time_s)}.` : "";
  setText(byId("lost"), `The console does not answer; trying again.${since}`);
  byId("lost").hidden = false;
  byId("state").className = "state";
  setText(byId("state"), "unknown");
}, 1000);

const pause = byId("pause");
pause.addEventListener("click", () => {
  const isPaused = pause.getAttribute("aria-pressed") !== "true";
  pause.setAttribute("aria-pressed", String(isPaused));
  requests.pause(isPaused);
});
const find = () => byId("find").value.trim() && dialog.open(byId("find").value.trim(), byId("find"));
byId("open").addEventListener("click", find);
byId("find").addEventListener("keydown", (event) => {
  if (event.key !== "Enter") return;
  event.preventDefault(); // or the same key press would hit the dialog's button, which has the focus by then
  find();
});

heardMs = performance.now();
connect();
const asked = new URLSearchParams(location.hash.slice(1)).get("trace");
if (asked) dialog.open(asked);
