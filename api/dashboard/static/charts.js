import { ask, byId } from "./dom.js";

const MAX_SAMPLES = 1200;
const HEIGHT = 180;
const KINDS = [
  { id: "ttft", field: "first_token_ms", unit: "ms", label: "First token" },
  { id: "rate", field: "tokens_per_s", unit: "tokens/s", label: "Decode" },
];

export class Charts {
  #samples = [];
  #plots = [];

  async start() {
    const { samples } = await ask("GET", "/admin/dashboard/samples");
    const known = this.#samples;
    this.#samples = samples;
    for (const one of known) this.add(one);
    this.#build();
    document.addEventListener("theme", () => this.#build());
    const watch = new ResizeObserver(() => this.#resize());
    for (const kind of KINDS) watch.observe(byId(kind.id));
  }

  add(sample) {
    const last = this.#samples.at(-1);
    if (last && last.at_s >= sample.at_s) return;
    this.#samples.push(sample);
    if (this.#samples.length > MAX_SAMPLES) this.#samples.shift();
    this.#plots.forEach((plot, index) => plot.setData(this.#data(KINDS[index])));
    this.#say();
  }

  #data(kind) {
    return [this.#samples.map((one) => one.at_s), this.#samples.map((one) => one[kind.field])];
  }

  #build() {
    for (const plot of this.#plots) plot.destroy();
    const style = getComputedStyle(document.documentElement);
    const ink = style.getPropertyValue("--soft"), line = style.getPropertyValue("--line");
    const axis = { stroke: ink, grid: { stroke: line }, ticks: { stroke: line } };
    this.#plots = KINDS.map((kind) => new globalThis.uPlot({
      width: this.#width(kind), height: HEIGHT, legend: { show: false }, cursor: { show: false },
      scales: { y: { range: (_, low, high) => [0, (high || 1) * 1.1] } },
      axes: [axis, { ...axis, size: 60, label: kind.unit, stroke: ink }],
      series: [{}, { label: kind.label, stroke: style.getPropertyValue("--accent"), width: 2, spanGaps: true, points: { show: true, size: 5 } }],
    }, this.#data(kind), byId(kind.id)));
    this.#say();
  }

  #width(kind) { return Math.max(byId(kind.id).clientWidth, 200); }

  #resize() {
    this.#plots.forEach((plot, index) => plot.setSize({ width: this.#width(KINDS[index]), height: HEIGHT }));
  }

  #say() {
    for (const kind of KINDS) {
      const last = this.#samples.findLast((one) => one[kind.field] !== null);
      byId(`${kind.id}-now`).textContent = last
        ? `Latest: ${last[kind.field].toFixed(1)} ${kind.unit}` : "Nothing was answered in the last hour.";
    }
  }
}
