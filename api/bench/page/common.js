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

function warn(machine) {
  if (machine.load_before[0] <= machine.cores / 2) return;
  place("warning").hidden = false;
  place("warning").textContent = `The machine was busy with other work (load ${machine.load_before[0]}): read the ratios only.`;
}

function table(figure) {
  const top = add(add(place("figures"), "thead"), "tr");
  for (const name of ["", ...peers]) add(top, "th", name).scope = "col";
  const body = add(place("figures"), "tbody");
  for (const title of new Set(report.rows.map((row) => row.title))) {
    const rows = report.rows.filter((row) => row.title === title);
    const line = add(body, "tr");
    const name = add(line, "th", title);
    name.scope = "row";
    add(name, "small", rows[0].meaning);
    for (const peer of peers) figure(add(line, "td"), rows.find((row) => row.peer === peer));
  }
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

const logAxis = () => ({ ...axes(), size: 64, values: (_, marks) => marks.map((mark) => (mark === null || Math.log10(mark) % 1 ? "" : spell(mark))) });

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

function drawAll(plots) {
  let drawn = [];
  const draw = () => {
    for (const plot of drawn) plot.destroy();
    drawn = Object.entries(plots).map(([id, make]) => make(Math.max(place(id).clientWidth, 240)));
  };
  draw();
  addEventListener("resize", draw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
}
