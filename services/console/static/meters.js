// KV blocks of every executor, and how full the streams are.

import { element, setText } from "./dom.js";
import { number, percent } from "./format.js";

const MAX_EXECUTORS = 16;
const NEARLY_FULL = 0.9;

export class Meters {
  constructor(root) {
    this.root = root;
    this.meters = new Map();
  }

  /** Show `{name, text, share}` each; what is not among them any more goes. */
  show(values) {
    const shown = values.slice(0, MAX_EXECUTORS);
    const names = new Set(shown.map((value) => value.name));
    for (const [name, meter] of this.meters) {
      if (!names.has(name)) {
        meter.root.remove();
        this.meters.delete(name);
      }
    }
    for (const value of shown) this.#meter(value.name).show(value);
  }

  #meter(name) {
    if (!this.meters.has(name)) {
      const meter = new Meter(name);
      this.meters.set(name, meter);
      this.root.append(meter.root);
    }
    return this.meters.get(name);
  }
}

class Meter {
  constructor(name) {
    this.text = element("span", { class: "muted" });
    this.fill = element("div");
    this.track = element("div", { class: "track", role: "meter", "aria-label": name, "aria-valuemin": 0, "aria-valuemax": 100 }, this.fill);
    this.root = element("div", { class: "meter" }, element("div", { class: "line" }, element("span", {}, name), this.text), this.track);
  }

  show({ text, share }) {
    setText(this.text, text);
    const filled = Math.min(1, Math.max(0, share));
    this.fill.style.width = `${(filled * 100).toFixed(1)}%`;
    this.track.setAttribute("aria-valuenow", Math.round(filled * 100));
    this.track.setAttribute("aria-valuetext", text);
    this.root.classList.toggle("full", filled >= NEARLY_FULL);
  }
}

export function executorMeter(executor) {
  const blocks = `${number(executor.blocks_used)} of ${number(executor.blocks_total)} blocks`;
  return { name: executor.name, share: executor.kv_usage, text: `${blocks} · ${executor.sequences} seqs · busy ${percent(executor.busy)}` };
}

const STREAM_NAMES = { work: "work queue", out: "output log" };

export function streamMeter(stream) {
  return { name: STREAM_NAMES[stream.name] ?? stream.name, share: stream.full, text: `${number(stream.messages)} messages · ${percent(stream.full)} full` };
}
