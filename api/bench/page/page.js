"use strict";
const report = JSON.parse(document.getElementById("data").textContent);
const peers = report.peers.map((one) => one.name);
const place = (id) => document.getElementById(id);
const HEIGHT = 280;

function add(parent, tag, text, className) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  parent.append(made);
  return made;
}

const times = (value) => (value < 10 ? String(Number(value.toPrecision(2))) : value.toFixed(0));
const spell = (ms) => (ms < 1000 ? `${ms} ms` : `${ms / 1000} s`);
const colour = (index) => getComputedStyle(document.documentElement).getPropertyValue(`--p${index % 6}`).trim();
const amount = (value, unit) => (unit ? `${Math.round(value).toLocaleString("en")} ${unit}` : value.toFixed(2));

function head() {
  const { environment: machine } = report;
  place("about").textContent = `${report.made_at}: ${report.num_rounds} rounds with ${report.model}, ` +
    `prompts of ${report.num_tokens} tokens, on ${machine.cpu} (${machine.cores} cores). ${report.command}`;
  if (machine.load_before[0] > machine.cores / 2) {
    place("warning").hidden = false;
    place("warning").textContent = `The machine was busy with other work (load ${machine.load_before[0]}): read the ratios only.`;
  }
  place("ratio").textContent = `Medians of the right answers, below them the range over the rounds; × is how many times better than ${report.baseline} in the same run. CPU seconds and reused tokens, as the server counts them, depend less on what else the machine does.`;
}

function figures() {
  const table = place("figures");
  const top = add(add(table, "thead"), "tr");
  for (const name of ["", ...peers]) add(top, "th", name).scope = "col";
  const body = add(table, "tbody");
  for (const title of new Set(report.rows.map((row) => row.title))) {
    const rows = report.rows.filter((row) => row.title === title);
    const line = add(body, "tr");
    const name = add(line, "th", title);
    name.scope = "row";
    add(name, "small", rows[0].meaning);
    for (const peer of peers) figure(add(line, "td"), rows.find((row) => row.peer === peer));
  }
}

function figure(cell, row) {
  if (!row) { add(cell, "small", "not asked"); return; }
  if (row.median !== null) {
    cell.append(amount(row.median, row.unit));
    if (row.peer !== report.baseline && row.times_better !== null) add(cell, "strong", ` ${times(row.times_better)}×`);
    const digits = row.unit ? 0 : 2;
    add(cell, "small", `${row.low.toFixed(digits)} to ${row.high.toFixed(digits)}`);
    if (row.cpu_s !== null) add(cell, "small", `${row.cpu_s.toFixed(1)} s of CPU, ${Math.round(row.cached_tokens ?? 0)} tokens reused`);
  }
  if (row.num_wrong) add(cell, "span", ` ${row.num_wrong} wrong`, "bad");
  if (row.num_failed) add(cell, "span", ` ${row.num_failed} failed`, "bad");
}

function key(id) {
  peers.forEach((name, index) => add(place(id), "span", name).style.setProperty("--own", `var(--p${index % 6})`));
}

const axes = () => {
  const style = getComputedStyle(document.documentElement);
  const line = style.getPropertyValue("--line").trim(), stroke = style.getPropertyValue("--soft").trim();
  return { stroke, grid: { stroke: line }, ticks: { stroke: line } };
};

const plain = { legend: { show: false }, cursor: { show: false }, height: HEIGHT };

function dots(width) {
  const asked = report.rounds.flatMap((round) => round.samples.map((one) => ({ ...one, peer: round.peer })));
  const shown = asked.filter((one) => one.ttft_ms !== null);
  const scenarios = [...new Set(shown.map((one) => one.scenario))];
  const at = (one) => scenarios.indexOf(one.scenario) + 1 + (peers.indexOf(one.peer) - (peers.length - 1) / 2) * (0.6 / peers.length);
  const points = shown.map((one) => ({ x: at(one), one })).sort((a, b) => a.x - b.x);
  const kinds = peers.flatMap((peer, index) => [true, false].map((isRight) => ({ peer, index, isRight })));
  const data = [points.map(({ x }) => x), ...kinds.map(({ peer, isRight }) =>
    points.map(({ one }) => (one.peer === peer && one.is_right === isRight ? one.ttft_ms : null)))];
  const axis = axes();
  place("dots-names").replaceChildren();
  for (const name of scenarios) add(place("dots-names"), "li", name);
  return new uPlot({
    ...plain, width,
    scales: { x: { time: false, range: [0.5, scenarios.length + 0.5] }, y: { distr: 3 } },
    axes: [
      { ...axis, splits: scenarios.map((_, index) => index + 1), values: (_, marks) => marks.map(String), grid: { show: false } },
      { ...axis, size: 64, values: (_, marks) => marks.map((mark) => (mark === null || Math.log10(mark) % 1 ? "" : spell(mark))) },
    ],
    series: [{}, ...kinds.map(({ index, isRight }) => ({
      paths: () => null, stroke: colour(index),
      points: { show: true, size: 8, stroke: colour(index), fill: isRight ? colour(index) : "transparent" },
    }))],
  }, data, place("dots"));
}

function lines(width) {
  const last = peers.map((peer) => report.rounds.findLast((round) => round.peer === peer && round.arrivals_ms.length));
  const times = [...new Set(last.flatMap((round) => round?.arrivals_ms ?? []))].sort((a, b) => a - b);
  const counts = last.map((round) => {
    const arrivals = round?.arrivals_ms ?? [];
    let seen = 0;
    return times.map((time) => {
      while (seen < arrivals.length && arrivals[seen] <= time) seen += 1;
      return time > arrivals.at(-1) ? null : seen;
    });
  });
  const axis = axes();
  return new uPlot({
    ...plain, width,
    scales: { x: { time: false } },
    axes: [{ ...axis, values: (_, marks) => marks.map((mark) => `${mark / 1000} s`) }, { ...axis, size: 56 }],
    series: [{}, ...peers.map((_, index) => ({ stroke: colour(index), width: 2, points: { show: false } }))],
  }, [times, ...counts], place("lines"));
}

function wrong() {
  const found = report.rounds.flatMap((round) => round.samples.filter((one) => !one.is_right)
    .map((one) => `${round.peer}, round ${round.number + 1}, ${one.scenario}: ${one.failure ?? `wrong text: ${one.said}`}`));
  if (!found.length) add(place("wrong"), "p", "None: every answer held what the conversation says.", "note");
  for (const one of found) add(place("wrong"), "p", one, "bad");
}

function who() {
  for (const one of report.peers) {
    add(place("who"), "p", `${one.name}: ${one.title} (tried: ${one.tried})`);
    if (one.start.length) add(add(place("who"), "p"), "code", one.start.join(" "));
  }
  for (const [name, value] of Object.entries(report.environment)) {
    add(place("machine"), "dt", name.replaceAll("_", " "));
    add(place("machine"), "dd", typeof value === "object" ? JSON.stringify(value) : value);
  }
}

let drawn = [];
function draw() {
  for (const plot of drawn) plot.destroy();
  drawn = [dots, lines].map((make, index) => make(Math.max(place(["dots", "lines"][index]).clientWidth, 240)));
}

head();
figures();
for (const id of ["dots-key", "lines-key"]) key(id);
wrong();
who();
draw();
addEventListener("resize", draw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
