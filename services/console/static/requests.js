// The list of recent requests: at most as many rows as the console sends, however many requests pass.

import { element, setText } from "./dom.js";
import { clock, duration, NOTHING, shortId } from "./format.js";

const MAX_ROWS = 100;

export class Requests {
  /** `open(name, opener)` is called with the trace that a person chose. */
  constructor(table, empty, open) {
    this.table = table;
    this.body = table.tBodies[0];
    this.empty = empty;
    this.rows = new Map();
    this.isPaused = false;
    this.waiting = new Map();
    this.body.addEventListener("click", (event) => {
      const row = event.target.closest("tr");
      if (row) open(row.dataset.trace, row.querySelector("button"));
    });
  }

  pause(isPaused) {
    this.isPaused = isPaused;
    if (!isPaused) this.show([...this.waiting.values()]);
    if (!isPaused) this.waiting.clear();
  }

  reset(lines) {
    for (const row of this.rows.values()) row.root.remove();
    this.rows.clear();
    this.show(lines);
  }

  /** Add or change rows; the newest is first. */
  show(lines) {
    if (this.isPaused) {
      for (const line of lines) this.waiting.set(line.trace_id, line);
      for (const name of this.waiting.keys()) {
        if (this.waiting.size <= MAX_ROWS) break;
        this.waiting.delete(name);
      }
      return;
    }
    for (const line of [...lines].sort((a, b) => a.started_s - b.started_s)) this.#put(line);
    this.#trim();
    this.table.hidden = this.rows.size === 0;
    this.empty.hidden = this.rows.size !== 0;
  }

  #put(line) {
    let row = this.rows.get(line.trace_id);
    if (!row) {
      row = new Row(line);
      this.rows.set(line.trace_id, row);
      let next = this.body.firstElementChild;
      while (next && Number(next.dataset.started) > line.started_s) next = next.nextElementSibling;
      this.body.insertBefore(row.root, next);
    }
    row.show(line);
  }

  #trim() {
    while (this.rows.size > MAX_ROWS) {
      const last = this.body.lastElementChild;
      this.rows.delete(last.dataset.trace);
      last.remove();
    }
  }

  explain(text) {
    setText(this.empty, text);
  }
}

class Row {
  constructor(line) {
    this.button = element("button", { type: "button", title: line.request_id });
    this.cells = Array.from({ length: 11 }, (_, index) => element("td", { class: index >= 4 && index <= 9 ? "number" : null }));
    this.cells[1].append(this.button);
    this.root = element("tr", { "data-trace": line.trace_id, "data-started": line.started_s }, ...this.cells);
  }

  show(line) {
    const count = (value) => (value == null ? NOTHING : String(value));
    const restarts = line.num_restarts ? `, ${line.num_restarts}× taken up again` : "";
    const isBad = line.outcome !== "done" && line.outcome !== "open";
    const texts = [
      clock(line.started_s), null, line.door, line.outcome + restarts, count(line.prompt_tokens), count(line.cached_tokens),
      count(line.output_tokens), duration(line.queue_s), duration(line.first_token_s), duration(line.duration_s), line.executor || NOTHING,
    ];
    texts.forEach((text, index) => text != null && setText(this.cells[index], text));
    this.cells[3].className = isBad ? "bad" : line.num_restarts || line.outcome === "open" ? "busy" : "ok";
    setText(this.button, shortId(line.request_id));
    this.button.title = line.request_id;
    this.button.setAttribute("aria-label", `Open the trace of ${line.request_id}`);
  }
}
