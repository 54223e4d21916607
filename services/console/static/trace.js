// One request's trace in a dialog: what was decided, and every span as a bar.

import { byId, element, setText } from "./dom.js";
import { clock, duration } from "./format.js";

const REFRESH_MS = 1000;
const MAX_REFRESHES = 120;
const LABEL_ROOM = 0.86;
const WORDS = {
  queued: "queue", cached: "cache", prefilled: "prefill", decoded: "decode", preempted: "preempted",
  moved: "moved", taken_over: "taken over", failed: "failed", ended: "end",
};

export class TraceDialog {
  constructor() {
    this.dialog = byId("trace");
    this.body = byId("trace-body");
    this.title = byId("trace-title");
    this.opened = 0;
    byId("trace-close").addEventListener("click", () => this.dialog.close());
    this.dialog.addEventListener("close", () => this.#closed());
    this.dialog.addEventListener("click", (event) => event.target === this.dialog && this.dialog.close());
  }

  /** Open the trace of a request's, an answer's or a trace's id; focus returns to `opener`. */
  async open(name, opener = null) {
    const turn = ++this.opened;
    this.opener = opener;
    this.expanded = new Set();
    this.shown = null;
    setText(this.title, name);
    this.body.replaceChildren(element("p", { class: "muted" }, "Asking…"));
    if (!this.dialog.open) this.dialog.showModal();
    history.replaceState(null, "", `#trace=${encodeURIComponent(name)}`);
    for (let count = 0; count < MAX_REFRESHES && turn === this.opened; count++) {
      const isComplete = await this.#load(name, turn);
      if (isComplete) return;
      await new Promise((resolve) => setTimeout(resolve, REFRESH_MS));
    }
  }

  #closed() {
    this.opened++;
    history.replaceState(null, "", location.pathname);
    if (this.opener?.isConnected) this.opener.focus();
  }

  async #load(name, turn) {
    let reply;
    try {
      const response = await fetch(`/console/traces/${encodeURIComponent(name)}`);
      if (!response.ok && response.status !== 404) throw new Error(`status ${response.status}`);
      reply = await response.json();
    } catch (error) {
      if (turn === this.opened) this.body.replaceChildren(element("p", { class: "bad" }, `The console does not answer (${error.message}).`));
      return false;
    }
    if (turn !== this.opened) return true;
    if (!reply.rows.length) {
      this.body.replaceChildren(element("p", { class: "empty" }, unknown(name)));
      return true;
    }
    if (JSON.stringify(reply) !== this.shown) {
      this.shown = JSON.stringify(reply);
      this.#show(reply);
    }
    return reply.decisions.some((decision) => decision.kind === "ended") && reply.rows.some((row) => row.role === "executor");
  }

  #show(reply) {
    setText(this.title, reply.request_ids[0] ?? reply.request);
    const parts = [facts(reply), decisions(reply), this.#waterfall(reply)];
    if (reply.num_missing) parts.push(element("p", { class: "muted" }, `${reply.num_missing} more spans were not kept.`));
    const focused = document.activeElement?.dataset?.span;
    this.body.replaceChildren(...parts);
    if (focused) this.body.querySelector(`[data-span="${CSS.escape(focused)}"]`)?.focus();
  }

  #waterfall(reply) {
    const total = Math.max(reply.duration_s, 1e-6);
    const ticks = [0, 0.25, 0.5, 0.75, 1].map((share) => placed(element("span", {}, duration(share * total)), share));
    const grid = element("div", { class: "waterfall", role: "group", "aria-label": "Spans in order of time" }, element("div", { class: "ruler", "aria-hidden": "true" }, ...ticks));
    for (const row of reply.rows) this.#addRow(grid, row, total);
    return grid;
  }

  #addRow(grid, row, total) {
    const isOpen = this.expanded.has(row.span_id);
    const label = `${row.name} at ${row.instance}, begins after ${duration(row.offset_s)}, takes ${duration(row.duration_s)}${row.error ? `, failed: ${row.error}` : ""}`;
    const button = element("button", { type: "button", class: "name", "aria-expanded": String(isOpen), "aria-label": label, "data-span": row.span_id, title: row.name }, row.name);
    button.style.paddingLeft = `${4 + Math.min(row.depth, 8) * 14}px`;
    const list = details(row);
    list.hidden = !isOpen;
    button.addEventListener("click", () => {
      list.hidden = !list.hidden;
      button.setAttribute("aria-expanded", String(!list.hidden));
      if (list.hidden) this.expanded.delete(row.span_id);
      else this.expanded.add(row.span_id);
    });
    grid.append(button, element("span", { class: "who" }, row.instance), lane(row, total), list);
  }
}

function unknown(name) {
  return `Nothing is known of ${name}. The console remembers only the latest requests since it was started; natterjack explain ${name} reads what the streams still hold.`;
}

function facts(reply) {
  const fact = (label, text) => element("span", {}, `${label} `, element("b", {}, text));
  const names = reply.request_ids.length > 3 ? `${reply.request_ids.slice(0, 3).join(", ")} and ${reply.request_ids.length - 3} more` : reply.request_ids.join(", ");
  return element(
    "p",
    { class: "facts" },
    fact("Began", clock(reply.started_s)),
    fact("Took", duration(reply.duration_s)),
    reply.error ? element("span", { class: "bad" }, `Failed: ${reply.error}`) : null,
    fact("Ids", names),
    fact("Trace", reply.trace_id),
  );
}

function decisions(reply) {
  return element(
    "ol",
    { class: "decisions", "aria-label": "What was decided" },
    ...reply.decisions.map((decision) =>
      element(
        "li",
        { class: decision.kind },
        element("span", { class: "at" }, `+${duration(decision.offset_s)}`),
        element("span", { class: "kind" }, WORDS[decision.kind] ?? decision.kind),
        element("span", {}, decision.text),
      ),
    ),
  );
}

function lane(row, total) {
  const start = clamp(row.offset_s / total);
  const end = clamp((row.offset_s + row.duration_s) / total);
  const bar = placed(element("div", { class: `span ${row.role}${row.error ? " failed" : ""}` }), start);
  bar.style.width = `${((end - start) * 100).toFixed(3)}%`;
  const took = element("span", { class: "took" }, duration(row.duration_s) + (row.error ? ` · ${row.error}` : ""));
  if (end < LABEL_ROOM) placed(took, end);
  else if (start > 1 - LABEL_ROOM) took.style.right = `${((1 - start) * 100).toFixed(3)}%`;
  else placed(took, start).classList.add("inside");
  const events = row.events.map((event) => placed(element("div", { class: "event", title: event.name }), clamp((row.offset_s + event.offset_s) / total)));
  return element("div", { class: "lane", "aria-hidden": "true" }, bar, ...events, took);
}

function details(row) {
  const pairs = Object.entries(row.attributes).flatMap(([key, value]) => [element("dt", {}, key), element("dd", {}, String(value))]);
  const events = row.events.flatMap((event) => [
    element("dt", {}, `+${duration(event.offset_s)} ${event.name}`),
    element("dd", {}, Object.entries(event.attributes).map(([key, value]) => `${key}=${value}`).join(" ")),
  ]);
  const nothing = pairs.length + events.length ? [] : [element("dt", {}, "no attributes"), element("dd")];
  return element("dl", {}, ...pairs, ...events, ...nothing);
}

function placed(node, share) {
  node.style.left = `${(share * 100).toFixed(3)}%`;
  return node;
}

function clamp(share) {
  return Math.min(1, Math.max(0, share));
}
