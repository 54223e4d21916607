// The last ten minutes as lines. Owns the points; uPlot draws them.

import uPlot from "./vendor/uplot-1.6.32/uPlot.esm.js";

import { byId, element, setText } from "./dom.js";
import { duration, number } from "./format.js";

const MAX_POINTS = 600;
const HEIGHT = 170;
const DASHES = { dashed: [7, 4], dotted: [2, 3] };

// In each: lines of (label, variable of the colour, style, value of a point).
const CHARTS = {
  "chart-requests": {
    title: "Requests ended per second",
    format: number,
    lines: [
      ["all", "--first", "", (point) => point.requests_per_s],
      ["failed", "--bad", "dashed", (point) => point.errors_per_s],
    ],
  },
  "chart-tokens": {
    title: "Tokens per second",
    format: number,
    lines: [
      ["output", "--first", "", (point) => point.output_tokens_per_s],
      ["prompt", "--second", "dashed", (point) => point.prompt_tokens_per_s],
    ],
  },
  "chart-queue": {
    title: "Requests held",
    format: number,
    lines: [
      ["running", "--first", "", (point) => point.running],
      ["waiting", "--second", "dashed", (point) => point.waiting],
    ],
  },
  "chart-ttft": { title: "Time to first token", format: duration, lines: percentiles("ttft_s") },
  "chart-itl": { title: "Time between tokens", format: duration, lines: percentiles("itl_s") },
};

function percentiles(field) {
  return [
    ["p50", "--first", "", (point) => point[field][0]],
    ["p95", "--second", "dashed", (point) => point[field][1]],
    ["p99", "--third", "dotted", (point) => point[field][2]],
  ];
}

export class Charts {
  constructor() {
    this.points = [];
    this.charts = Object.entries(CHARTS).map(([id, chart]) => new Chart(byId(id), chart));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.#redraw(true));
  }

  /** Replace all points. */
  reset(points) {
    this.points = points.slice(-MAX_POINTS);
    this.#redraw(false);
  }

  /** Append one second. */
  add(point) {
    this.points.push(point);
    if (this.points.length > MAX_POINTS) this.points.shift();
    this.#redraw(false);
  }

  #redraw(isRestyled) {
    for (const chart of this.charts) {
      if (isRestyled) chart.build();
      chart.show(this.points);
    }
  }
}

class Chart {
  constructor(root, { title, format, lines }) {
    this.format = format;
    this.lines = lines;
    this.values = lines.map(() => element("b"));
    this.swatches = lines.map(([, , style]) => element("i", { class: style }));
    const keys = lines.map(([label], index) => element("span", { class: "key" }, this.swatches[index], `${label} `, this.values[index]));
    this.nothing = element("p", { class: "nothing" }, "nothing measured yet");
    this.plot = element("div", { class: "plot" }, this.nothing);
    root.append(element("figcaption", {}, element("h2", {}, title), ...keys), this.plot);
    this.build();
    new ResizeObserver(() => this.uplot.setSize(this.#size())).observe(this.plot);
  }

  #size() {
    return { width: Math.max(200, this.plot.clientWidth), height: HEIGHT };
  }

  build() {
    const style = getComputedStyle(document.documentElement);
    const colour = (variable) => style.getPropertyValue(variable).trim();
    const axis = { stroke: colour("--muted"), grid: { stroke: colour("--line"), width: 1 }, ticks: { stroke: colour("--line"), width: 1, size: 4 }, font: "12px system-ui, sans-serif" };
    this.swatches.forEach((swatch, index) => (swatch.style.color = colour(this.lines[index][1])));
    this.uplot?.destroy();
    this.uplot = new uPlot(
      {
        ...this.#size(),
        padding: [8, 8, 0, 0],
        legend: { show: false },
        cursor: { y: false, drag: { x: false, y: false }, points: { size: 6 } },
        scales: { y: { range: (_, low, high) => [0, high > 0 ? high * 1.1 : 1] } },
        axes: [
          { ...axis, size: 28, space: 80, values: [[60, "{HH}:{mm}", null, null, null, null, null, null, 1], [1, "{HH}:{mm}:{ss}", null, null, null, null, null, null, 1]] },
          { ...axis, size: 62, space: 34, values: (_, ticks) => ticks.map((tick) => this.format(tick)) },
        ],
        series: [{}, ...this.lines.map(([label, variable, style]) => ({ label, stroke: colour(variable), width: 1.75, dash: DASHES[style], points: { show: false }, spanGaps: false }))],
        hooks: { setCursor: [() => this.#showValues()] },
      },
      this.data ?? [[], ...this.lines.map(() => [])],
      this.plot,
    );
  }

  show(points) {
    this.data = [points.map((point) => point.time_s), ...this.lines.map(([, , , value]) => points.map(value))];
    this.uplot.setData(this.data);
    this.nothing.hidden = this.data.slice(1).some((line) => line.some((value) => value != null));
    this.#showValues();
  }

  #showValues() {
    if (!this.data) return;
    const hovered = this.uplot?.cursor.idx;
    const index = hovered ?? this.data[0].length - 1;
    this.values.forEach((node, line) => setText(node, this.format(this.data[line + 1][index])));
  }
}
