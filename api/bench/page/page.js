"use strict";
const amount = (value, unit) => (unit ? `${Math.round(value).toLocaleString("en")} ${unit}` : value.toFixed(2));

function head() {
  const { environment: machine } = report;
  place("about").textContent = `${report.made_at}: ${report.num_rounds} rounds with ${report.model}, ` +
    `prompts of ${report.num_tokens} tokens, on ${machine.gpu || machine.cpu} (${machine.cores} cores)${report.texts_judged === false ? "; random weights: texts were not judged" : ""}. ${report.command}`;
  warn(machine);
  place("ratio").textContent = `Medians of the right answers, below them the range over the rounds; × is how many times better than ${report.baseline} in the same run. CPU seconds and reused tokens, as the server counts them, depend less on what else the machine does.`;
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
      logAxis(),
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

head();
table(figure);
for (const id of ["dots-key", "lines-key"]) key(id);
wrong();
who();
drawAll({ dots, lines });
