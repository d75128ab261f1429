/* Cost: bytes, time and forward passes, and each method's metric at equal bytes and time, which `results/equal_budget.py` ranks. */

page.views.push({
  id: "cost",
  name: "Cost",
  ready: (data) => data.cost.length > 0,
  async draw(root, data) {
    const label = (one) => data.methods[one.method].label;
    const talking = data.cost.filter((one) => one.bytes > 0);
    root.append(h("h2", {}, "Cost per client over the whole run"));
    const columns = [
      { name: "Method", text: true },
      { name: "n", show: (v) => show(v) },
      { name: "models received", show: (v) => show(v) },
      { name: "bytes received", show: (v) => (Number.isFinite(v) ? bytes(v) : "–") },
      { name: "bytes sent to a server", show: (v) => (Number.isFinite(v) ? bytes(v) : "–") },
      { name: "models missing", show: (v) => show(v) },
      { name: "samples trained on", show: (v) => show(v) },
      { name: "seconds per run", show: (v) => show(v) },
    ];
    const counted = Object.keys(data.cost[0].counted).filter((name) => data.cost.some((one) => one.counted[name]));
    columns.splice(6, 0, ...counted.map((name) => ({ name: metricOf(data, name).title, show: (v) => show(v, metricOf(data, name)) })));
    const number = (v) => (v === null ? NaN : v);
    root.append(h("div", { class: "scroll" }, sortable(columns, data.cost.map((one) => ({
      cells: [label(one), one.seeds, one.reads, one.received, one.sent, one.missing, ...counted.map((name) => number(one.counted[name])), number(one.train_samples), number(one.wall_s)],
    })), { label: "Cost per method" })));
    root.append(h("p", { class: "note" }, "Means over clients and n seeds. Bytes sent to peers are counted once, as the bytes that the peers receive; bytes sent to a server are counted separately. Forward passes are those of evaluating received models, in methods that compare peers by loss; “–” where a method has none."));
    const timed = data.cost.every((one) => one.seconds);
    if (talking.length) budgetChart(root, data, {
      title: "by bytes used", name: "bytes per client", show: bytes, spent: (one) => one.spent, moving: talking,
      caption: "Horizontal: cumulative bytes per client, received and sent to a server. A method without traffic is a dashed line at its final value.",
    });
    if (timed) budgetChart(root, data, {
      title: "by time", name: "seconds", show: seconds, spent: (one) => one.seconds, moving: data.cost,
      caption: "Horizontal: seconds since the warm-up, virtual in a simulation and real between machines.",
    });
    for (const equal of data.equal) {
      if (equal.unit === "bytes" && !talking.length) continue;
      equalTable(root, data, equal);
    }
  },
});

const seconds = (v) => `${show(v)} s`;

/* Validation of the newest models over what was used of something. */
function budgetChart(root, data, { title, name, show: write, spent, moving, caption }) {
  const metric = metricOf(data, data.metric);
  const label = (one) => data.methods[one.method].label;
  const heading = `Validation ${metric.title} of the newest models, ${title}`;
  const end = Math.max(...moving.map((one) => spent(one).at(-1)));
  root.append(h("h2", {}, heading));
  chart(root, {
    height: 380,
    alt: heading,
    caption,
    option: () => ({
      xAxis: axis(name, { type: "value", min: 0, axisLabel: { color: css("--muted"), formatter: write }, splitLine: { show: false } }),
      yAxis: axis(`validation ${metric.title}`, { type: "value", scale: true, nameGap: 44,
        axisLabel: { color: css("--muted"), formatter: tick(metric) } }),
      tooltip: { ...tooltipStyle(), trigger: "item", formatter: (e) => (e.value ? `${escapeText(e.seriesName)}<br>${write(e.value[0])}: <b>${show(e.value[1], metric)}</b>` : "") },
      series: [...moving.flatMap((one) => banded(label(one), spent(one).map((s, i) => [s, one.reached[i] ?? NaN, NaN]), methodColor(one.method), methodDash(one.method), false)
        .map((series) => ({ ...series, showSymbol: true, symbol: markOf(one.method), symbolSize: 5 }))),
      ...data.cost.filter((one) => !moving.includes(one) && one.reached.length).map((one) => ({
        name: label(one), type: "line", data: [[0, one.reached.at(-1)], [end, one.reached.at(-1)]], showSymbol: false,
        lineStyle: { color: methodColor(one.method), type: "dashed", width: 1.5 }, itemStyle: { color: methodColor(one.method) },
      }))],
    }),
  });
}

function equalTable(root, data, equal) {
  if (!equal.rows.length) return;
  const scored = metricOf(data, equal.metric);
  const [what, write] = equal.unit === "bytes" ? ["bytes", bytes] : ["time", seconds];
  const when = equal.unit === "bytes"
    ? `when a client has used ${bytes(equal.budget)}: what the communicating method that uses least has used in all.`
    : `after ${seconds(equal.budget)}: when the method that ends first has ended.`;
  root.append(h("h2", {}, `At equal ${what}`), h("p", {}, `${equal.heading[0].toUpperCase()}${equal.heading.slice(1)}, ${when}`),
    h("div", { class: "scroll" }, sortable([
      { name: "Method", text: true }, { name: "n", show: (v) => show(v) }, { name: scored.heading, show: (v) => show(v, scored) },
      { name: "± over seeds", show: (v) => show(v, scored) }, { name: "rounds by then", show: (v) => show(v) }, { name: `${what} by then`, show: write },
    ], equal.rows.map((one) => ({ cells: [one.label, one.seeds, one.value ?? NaN, one.std ?? NaN, one.rounds, one.used] })), { label: `At equal ${what}` })),
    equal.caveat ? h("p", { class: "note" }, equal.caveat) : "",
    ...equal.verdicts.map((line) => h("p", { class: "note" }, `${line}.`)));
}
