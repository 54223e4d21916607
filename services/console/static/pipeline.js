// The picture of the pipeline: built once, then only texts, classes and, with the number of instances, heights change.

import { setText, svg } from "./dom.js";
import { number } from "./format.js";

const WIDTH = 156;
const TOP = 66;
const HEAD = 46;
const LINE = 17;
const GAP = 66; // between the two rows, for the labels of what passes from one to the other
const MAX_LINES = 4;
const MAX_CHARS = 22;

const BOXES = {
  gateway: { x: 178, title: "gateway" },
  tokenizer: { x: 432, title: "tokenizer" },
  scheduler: { x: 812, title: "scheduler" },
  cache_manager: { x: 812, isBelow: true, title: "cache manager" },
  executor: { x: 1084, title: "executor" },
};
const STREAMS = {
  work: { x: 680, width: 98, title: "work queue" },
  out: { x: 312, width: 104, isBelow: true, title: "output log" },
};
// Paths are functions of the y of the lower row and of the lower edges of the boxes above.
const FLOWS = {
  "client-gateway": { path: () => "M92 92 H174", label: [133, 84] },
  "gateway-client": { path: () => "M174 114 H92", label: [133, 130] },
  "gateway-tokenizer": { path: () => "M338 96 H428", label: [381, 88] },
  "tokenizer-work": { path: () => "M592 96 H676", label: [634, 88] },
  "work-scheduler": { path: () => "M780 96 H808" },
  "scheduler-tokenizer": { path: () => "M890 62 V30 H510 V62", label: [700, 22] },
  "scheduler-executor": { path: () => "M972 88 H1080", label: [1026, 80] },
  "executor-scheduler": { path: () => "M1080 112 H972", label: [1026, 128] },
  "scheduler-cache_manager": { path: (below, bottom) => `M890 ${bottom.scheduler + 4} V${below - 4}`, label: [900, null], isMutual: true },
  "tokenizer-out": { path: (below, bottom) => `M510 ${bottom.tokenizer + 4} V${below + 27} H420`, label: [520, null] },
  "out-gateway": { path: (below, bottom) => `M308 ${below + 27} H256 V${bottom.gateway + 4}` },
};
const SEQUELS = { "tokenizer-work": "work-scheduler", "tokenizer-out": "out-gateway" };
const SYMBOLS = { ok: "●", busy: "◐", bad: "✕" };

export class Pipeline {
  constructor(root) {
    this.root = root;
    this.services = {};
    this.flows = {};
    this.streams = {};
    this.lower = [];
    const arrow = svg("marker", { id: "arrow", viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 7, markerHeight: 7, orient: "auto-start-reverse" });
    arrow.append(svg("path", { d: "M0 0 L8 4 L0 8 Z" }));
    root.append(svg("defs", {}, arrow));
    for (const [name, flow] of Object.entries(FLOWS)) root.append(this.#flow(name, flow));
    root.append(clients());
    for (const [name, stream] of Object.entries(STREAMS)) root.append(this.#stream(name, stream));
    for (const [role, box] of Object.entries(BOXES)) root.append(this.#service(role, box));
    this.#layOut();
  }

  #flow(name, { label, isMutual }) {
    const path = svg("path", { "marker-end": "url(#arrow)", "marker-start": isMutual && "url(#arrow)" });
    const text = label && svg("text", { x: label[0], y: label[1] ?? 0, "text-anchor": label[1] == null ? "start" : "middle" });
    const group = svg("g", { class: "flow" }, path, text);
    this.flows[name] = { group, path, text };
    return group;
  }

  #stream(name, { x, width, isBelow, title }) {
    const y = isBelow ? 0 : TOP + 3;
    const count = svg("text", { x: x + width / 2, y: y + 42, class: "quiet", "text-anchor": "middle" });
    this.streams[name] = count;
    const group = svg(
      "g",
      {},
      svg("rect", { class: "box", x, y, width, height: 54, rx: 27 }),
      svg("text", { x: x + width / 2, y: y + 24, "text-anchor": "middle" }, title),
      count,
    );
    if (isBelow) this.lower.push(group);
    return group;
  }

  #service(role, { x, isBelow, title }) {
    const y = isBelow ? 0 : TOP;
    const box = svg("rect", { class: "box", x, y, width: WIDTH, rx: 8 });
    const state = svg("text", { x: x + 12, y: y + 39 });
    const lines = Array.from({ length: MAX_LINES }, (_, index) => svg("text", { x: x + 12, y: y + HEAD + 12 + LINE * index, "font-size": 12 }));
    const hint = svg("title");
    const group = svg("g", { class: "service" }, hint, box, svg("text", { x: x + 12, y: y + 21, class: "title" }, title), state, ...lines);
    this.services[role] = { group, box, state, lines, hint, height: HEAD + LINE + 4, isBelow };
    if (isBelow) this.lower.push(group);
    return group;
  }

  /** Show an overview. */
  show(overview) {
    for (const view of overview.roles) if (this.services[view.role]) this.#showService(view);
    for (const flow of overview.flows) this.#showFlow(flow);
    for (const stream of overview.streams) {
      if (this.streams[stream.name]) setText(this.streams[stream.name], `${number(stream.messages)} msgs`);
    }
    this.#layOut();
  }

  #showService(view) {
    const service = this.services[view.role];
    const { group, state, lines, hint } = service;
    group.setAttribute("class", `service ${view.health}`);
    state.setAttribute("class", view.health);
    setText(state, `${SYMBOLS[view.health]} ${view.state}`);
    const count = view.instances.length;
    const shown = count > MAX_LINES ? worstFirst(view.instances).slice(0, MAX_LINES - 1) : view.instances;
    lines.forEach((line, index) => {
      const instance = shown[index];
      line.setAttribute("class", instance ? instance.health : "quiet");
      if (instance) setText(line, fitting(`${SYMBOLS[instance.health]} ${label(instance)}`));
      else setText(line, index === shown.length && count > shown.length ? `and ${count - shown.length} more` : "");
    });
    service.height = HEAD + LINE * Math.max(1, Math.min(MAX_LINES, count)) + 4;
    setText(hint, view.instances.map((instance) => `${instance.name}: ${instance.state}`).join("\n") || view.state);
  }

  #showFlow(flow) {
    const drawn = this.flows[flow.name];
    if (!drawn) return;
    const look = flow.per_s > 0 ? "flow live" : "flow";
    drawn.group.setAttribute("class", look);
    if (drawn.text) setText(drawn.text, `${number(flow.per_s)} ${flow.unit}`);
    if (SEQUELS[flow.name]) this.flows[SEQUELS[flow.name]].group.setAttribute("class", look);
  }

  /** Place the lower row beneath the highest box of the upper one. */
  #layOut() {
    const bottom = {};
    for (const [role, { box, height, isBelow }] of Object.entries(this.services)) {
      box.setAttribute("height", height);
      if (!isBelow) bottom[role] = TOP + height;
    }
    const below = Math.max(...Object.values(bottom)) + GAP;
    const end = below + Math.max(54, this.services.cache_manager.height) + 6;
    const layout = `${below} ${end} ${Object.values(bottom).join()}`;
    if (layout === this.layout) return;
    this.layout = layout;
    this.root.setAttribute("viewBox", `0 0 1248 ${end}`);
    for (const group of this.lower) group.setAttribute("transform", `translate(0 ${below})`);
    for (const [name, { path, label: place }] of Object.entries(FLOWS)) {
      this.flows[name].path.setAttribute("d", path(below, bottom));
      if (place?.[1] === null) this.flows[name].text.setAttribute("y", below - GAP / 2 + 4);
    }
  }
}

function clients() {
  return svg(
    "g",
    {},
    svg("rect", { class: "box", x: 8, y: TOP, width: 80, height: 67, rx: 8 }),
    svg("text", { x: 48, y: TOP + 38, "text-anchor": "middle" }, "clients"),
  );
}

function label(instance) {
  return instance.state === "ready" ? instance.name : `${instance.name}: ${instance.state}`;
}

function worstFirst(instances) {
  const rank = { bad: 0, busy: 1, ok: 2 };
  return [...instances].sort((a, b) => rank[a.health] - rank[b.health]);
}

function fitting(text) {
  return text.length > MAX_CHARS ? `${text.slice(0, MAX_CHARS - 1)}…` : text;
}
