"use strict";
const latest = peers.map((peer) => report.runs.findLast((run) => run.peer === peer));

function head() {
  const { environment: machine, traffic } = report;
  place("about").textContent = `${report.made_at}: ${traffic.num_sessions} sessions and ${traffic.num_sub_agents} sub-agents with ${report.model}, ` +
    `tokens at ${report.scale} and pauses at ${report.pause_scale} of what was published, ${report.num_at_once} sessions at once, on ${machine.gpu || machine.cpu} (${machine.cores} cores). ${report.command}`;
  warn(machine);
  place("ratio").textContent = `Every server got the same traffic; × is how many times better than ${report.baseline} in the same run. ` +
    (report.runs.some((run) => run.ended_early) ? "Figures are over the turns that every server was asked, because some ended early; figures of whole runs are left out for those." : "");
  place("computed-note").textContent = "Turns in the order of their sending, of the last round. The line that grows fastest is of the server that computes most again." +
    peers.filter((_, index) => !tells(latest[index])).map((name) => ` ${name} does not tell.`).join("");
  for (const [name, value] of Object.entries(traffic)) {
    add(place("traffic"), "dt", name.replaceAll("_", " "));
    add(place("traffic"), "dd", value.toLocaleString("en"));
  }
}

const answered = (run) => (run ? run.turns.filter((one) => !one.failure) : []);
const tells = (run) => answered(run).every((one) => one.cached_tokens !== undefined);

function figure(cell, row) {
  if (!row || row.value === null) { add(cell, "small", row ? "not told" : "not run"); return; }
  const digits = ["%", "s"].includes(row.unit) ? 1 : 0;
  cell.append(`${row.value.toLocaleString("en", { maximumFractionDigits: digits })} ${row.unit}`);
  if (row.peer !== report.baseline && row.times_better != null) add(cell, "strong", ` ${times(row.times_better)}×`);
  if (row.values.length > 1) add(cell, "small", row.values.join(", "));
}

function waits(width) {
  const steps = Array.from({ length: 200 }, (_, index) => (index + 1) / 2);
  const lines = latest.map((run) => {
    const ordered = answered(run).map((one) => one.ttft_ms).sort((a, b) => a - b);
    return steps.map((share) => (ordered.length ? ordered[Math.max(0, Math.ceil((share / 100) * ordered.length) - 1)] : null));
  });
  const axis = axes();
  return new uPlot({
    ...plain, width,
    scales: { x: { time: false }, y: { distr: 3 } },
    axes: [{ ...axis, values: (_, marks) => marks.map((mark) => `${mark} %`) }, logAxis()],
    series: [{}, ...peers.map((_, index) => ({ stroke: colour(index), width: 2, points: { show: false } }))],
  }, [steps, ...lines], place("waits"));
}

function computed(width) {
  const sums = latest.map((run) => {
    let sum = 0;
    return tells(run) ? answered(run).sort((a, b) => a.sent_s - b.sent_s).map((one) => (sum += one.prompt_tokens - one.cached_tokens)) : [];
  });
  const numbers = Array.from({ length: Math.max(1, ...sums.map((one) => one.length)) }, (_, index) => index + 1);
  const axis = axes();
  return new uPlot({
    ...plain, width,
    scales: { x: { time: false } },
    axes: [axis, { ...axis, size: 72, values: (_, marks) => marks.map((mark) => mark.toLocaleString("en")) }],
    series: [{}, ...peers.map((_, index) => ({ stroke: colour(index), width: 2, points: { show: false } }))],
  }, [numbers, ...sums.map((one) => numbers.map((_, index) => one[index] ?? null))], place("computed"));
}

function course(width) {
  const points = latest.flatMap((run, index) => answered(run).map((one) => ({ x: one.sent_s, y: one.ttft_ms, index }))).sort((a, b) => a.x - b.x);
  const axis = axes();
  return new uPlot({
    ...plain, width,
    scales: { x: { time: false }, y: { distr: 3 } },
    axes: [{ ...axis, values: (_, marks) => marks.map((mark) => `${mark} s`) }, logAxis()],
    series: [{}, ...peers.map((_, index) => ({ paths: () => null, stroke: colour(index), points: { show: true, size: 4, stroke: colour(index), fill: colour(index) } }))],
  }, [points.map(({ x }) => x), ...peers.map((_, index) => points.map((one) => (one.index === index ? one.y : null)))], place("course"));
}

function wrong() {
  const said = report.not_run.map((one) => `${one.name} was not run: ${one.why}`);
  for (const run of report.runs) {
    if (run.ended_early) said.push(`${run.peer}, round ${run.number + 1}, ended early: ${run.ended_early}`);
    const failed = run.turns.filter((one) => one.failure);
    for (const one of failed.slice(0, 5)) said.push(`${run.peer}, agent ${one.agent}, turn ${one.turn + 1}: ${one.failure}`);
    if (failed.length > 5) said.push(`${run.peer}: ${failed.length - 5} more`);
  }
  if (!said.length) add(place("wrong"), "p", "None: every turn was answered.", "note");
  for (const one of said) add(place("wrong"), "p", one, "bad");
}

head();
table(figure);
for (const id of ["waits-key", "computed-key", "course-key"]) key(id);
wrong();
who();
drawAll({ waits, computed, course });
